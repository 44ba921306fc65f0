"""Points the audit of Privet at Opacus or at jax-privacy, through thin adapters, and writes what it found.

    python benchmarks/audit_peers.py opacus
    python benchmarks/audit_peers.py jax-privacy --json --out findings.json

Each library is looked for in the Python that runs this (see README.md beside this file); nothing here is part of the
tests. A line that begins with "NO" is a claim that did not hold where it was tried; all lines are measurements.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from importlib import metadata
from pathlib import Path

PEERS = {
    "opacus": ("peer_opacus", "opacus", "1.6.0", ("torch", "numpy")),
    "jax-privacy": ("peer_jax", "jax-privacy", "2.0.0", ("jax", "optax", "dp-accounting", "numpy")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", choices=sorted(PEERS))
    parser.add_argument("--json", action="store_true", help="write JSON in place of lines")
    parser.add_argument("--out", type=Path, help="write to this file as well")
    options = parser.parse_args()
    module, package, wanted, others = PEERS[options.library]
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        print(
            f"{package} is not installed in this Python: make an environment for it as benchmarks/README.md says, "
            f"and run this script with its Python.",
            file=sys.stderr,
        )
        return 2
    versions = {"python": platform.python_version(), package: found}
    versions |= {name: metadata.version(name) for name in others} | {"privet": metadata.version("privet")}
    sections = importlib.import_module(module).audit()
    if options.json:
        text = json.dumps(
            {
                "command": f"python benchmarks/audit_peers.py {options.library}",
                "versions": versions,
                "sections": {name: [check.to_json() for check in checks] for name, checks in sections.items()},
            },
            indent=1,
        )
    else:
        lines = [", ".join(f"{name} {version}" for name, version in versions.items())]
        if found != wanted:
            lines.append(f"Written for {package} {wanted}: with {found} some of this may be wrong.")
        for name, checks in sections.items():
            lines += ["", name] + [_line(check) for check in checks]
        text = "\n".join(lines)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0


def _line(check) -> str:
    short = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)  # noqa: E731
    against = "" if check.bound is None else f" against {short(check.bound)}"
    detail = f" ({check.detail})" if check.detail else ""
    return f"  {'ok' if check.holds else 'NO'}  {check.name}: {short(check.measured)}{against}{detail}"


if __name__ == "__main__":
    sys.exit(main())
