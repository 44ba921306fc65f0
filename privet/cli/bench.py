"""`privet bench`: what privacy costs in time and memory, on this machine."""

from __future__ import annotations

import argparse

NAME = "bench"
HELP = "step time and memory against ordinary training"

DEFAULT_BATCHES = {
    "mnist-cnn": 512,
    "cifar-cnn": 256,
    "mlp": 8192,
    "resnet18-gn": 64,
    "transformer": 32,
    "bn-lenet5": 64,
    "convnet5": 64,
    "resnet18-bn": 64,
    "backprop-mnist": 512,
    "backprop-cifar": 256,
    "lipschitz-mlp": 8192,
    "lipschitz-lenet": 512,
    "lipschitz-vgg": 256,
    "lipschitz-resnet": 256,
    "lipschitz-mixer": 256,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="mnist-cnn", help="one of %(choices)s", choices=list(DEFAULT_BATCHES))
    parser.add_argument("--batch", type=int, help="records per step (default: a common one for the model)")
    parser.add_argument("--method", default="per-example", help="which method (default: %(default)s)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the method, say groups=layer"
    )
    parser.add_argument(
        "--against", metavar="METHOD", help="compare with the step of another method, in place of an ordinary one"
    )
    parser.add_argument("--loss", default="ce", help="what is minimised in the measured step (default: %(default)s)")
    parser.add_argument(
        "--repetitions", type=int, default=15, help="steps of each kind in a process (default: %(default)s)"
    )
    parser.add_argument(
        "--processes", type=int, default=5, help="how often all of that is done anew (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, help="threads for torch (default: its own choice)")
    parser.add_argument(
        "--keep-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether both keep freed memory, as runs do by default",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    import torch  # noqa: PLC0415

    from ..bench import Case, measure  # noqa: PLC0415
    from ..training import check_compute, to_json  # noqa: PLC0415
    from ._options import method_from  # noqa: PLC0415

    check_compute(args.threads)
    if args.threads:
        torch.set_num_threads(args.threads)
    batch = DEFAULT_BATCHES[args.model] if args.batch is None else args.batch
    case = Case(model=args.model, batch=batch, loss=args.loss)
    result = measure(
        case,
        method_from(args.method, args.option),
        against=None if args.against is None else method_from(args.against, []),
        repetitions=args.repetitions,
        processes=args.processes,
        keep_memory=args.keep_memory,
    )
    if args.json:
        print(to_json(result))
        return 0
    what = f"{args.method} with {case.loss} against {result['against']}"
    print(f"{case.model}, batch {case.batch}, {what}, {result['threads']} threads of {result['processor']}")
    low, high = result["ratio_range"]
    ratio = f"ratio {result['ratio']:.2f} ({low:.2f} to {high:.2f} in {result['processes']} processes)"
    print(f"  time    {result['base_ms']:8.1f} ms → {result['private_ms']:8.1f} ms   {ratio}")
    memory = f"{result['base_mib']:8.0f} MiB → {result['private_mib']:7.0f} MiB"
    print(f"  memory  {memory}  ratio {result['memory_ratio']:.2f}")
    return 0
