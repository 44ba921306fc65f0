"""What every run on one data set has spent, in one SQLite file, written before anything is released.

The ledger belongs to the data, not to a run: privacy loss adds up over all runs, also those thrown away. A
run registers its mechanism (`Ledger.open_run`) and pays for each step (`Ledger.charge`) before it releases
anything of it. Nothing here lowers what was paid; triggers in the file itself refuse it.

All users of a file must be on one machine: SQLite's write-ahead log does not work between hosts. After a
crash the last charges may still lie in the file's `-wal` companion: copy or move the two together.
"""

from __future__ import annotations

import json
import math
import operator
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn
from uuid import uuid4
from weakref import WeakSet, finalize

from privet.accounting import Mechanism, count_for
from privet.errors import BudgetExceeded, ConfigError, LedgerError

Budget = tuple[float, float]  # epsilon, delta

_APPLICATION_ID = 0x50525654  # "PRVT"
_VERSION = 1
_WAIT_SECONDS = 30.0  # for another process that is writing

_SCHEMA = f"""
BEGIN;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
CREATE TABLE dataset (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    label TEXT NOT NULL, created TEXT NOT NULL, epsilon REAL, delta REAL
);
CREATE TABLE runs (
    run TEXT PRIMARY KEY, unit TEXT NOT NULL, epsilon REAL, delta REAL, planned INTEGER,
    note TEXT NOT NULL, started TEXT NOT NULL, finished TEXT
);
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL REFERENCES runs (run), mechanism TEXT NOT NULL,
    units INTEGER NOT NULL DEFAULT 0 CHECK (typeof(units) = 'integer' AND units >= 0),
    last_step INTEGER NOT NULL DEFAULT 0, charged TEXT,
    UNIQUE (run, mechanism)
);
CREATE TRIGGER spending_only_grows BEFORE UPDATE ON entries
    WHEN NEW.units < OLD.units OR NEW.mechanism <> OLD.mechanism
    BEGIN SELECT RAISE(ABORT, 'what was spent cannot be lowered'); END;
CREATE TRIGGER entries_are_kept BEFORE DELETE ON entries
    BEGIN SELECT RAISE(ABORT, 'what was spent cannot be forgotten'); END;
COMMIT;
"""
_OPEN_RUN = """
INSERT INTO runs (run, unit, epsilon, delta, planned, note, started) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (run) DO UPDATE SET epsilon = excluded.epsilon, delta = excluded.delta,
    planned = excluded.planned, note = excluded.note, finished = NULL
"""
_CHARGE = """
UPDATE entries SET units = units + ?, last_step = max(last_step, ?), charged = ?
WHERE id = ? AND run = ? AND mechanism = ?
"""
_PAID = "SELECT units FROM entries WHERE id = ?"
_LAST_STEP = "SELECT max(last_step) FROM entries WHERE run = ?"
_TOTALS = """
SELECT mechanism, sum(units) FROM entries WHERE ?1 IS NULL OR run = ?1 GROUP BY mechanism ORDER BY min(id)
"""

_FOREIGN = "is not a Privet ledger. Name another file; this one was not touched"
_DAMAGED = "is damaged. Put back a copy of it and its -wal file; a new ledger would forget what was spent"
_CAUSES = {
    sqlite3.SQLITE_BUSY: "is held by another process. Try again when that process has finished",
    sqlite3.SQLITE_READONLY: "cannot be written. Give this user write access to the file and its folder",
    sqlite3.SQLITE_FULL: "cannot grow: the disk is full. Free some space and resume the run",
    sqlite3.SQLITE_IOERR: "could not be read or written by the disk. Check its free space and its health",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened. Check that its folder exists and may be written to",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _FOREIGN,
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One mechanism of one run: what `Ledger.charge` is told to charge. `key` is the mechanism as stored."""

    id: int
    run: str
    mechanism: Mechanism
    key: str


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What the ledger knows of one run. Times are UTC in ISO format.

    `mechanism` is the one registered last; `spent` has all of them with their counts, which sum to `units`.
    """

    run: str
    started: str
    charged: str | None
    steps: int
    units: int
    mechanism: Mechanism
    spent: tuple[tuple[Mechanism, int], ...]
    unit: str
    budget: Budget | None
    planned: int | None
    note: str
    finished: bool


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Counts per mechanism, `limit`, that were found to fit into `budget` when `seen` was spent.

    Whatever has no more of any mechanism fits too: leaving compositions out never raises epsilon.
    """

    budget: Budget | None = None
    limit: Mapping[str, int] = field(default_factory=dict)
    seen: Mapping[str, int] = field(default_factory=dict)

    def covers(self, budget: Budget, totals: Mapping[str, int]) -> bool:
        return budget == self.budget and all(n <= self.limit.get(key, 0) for key, n in totals.items())


@dataclass(eq=False)
class _Commit:
    """The end of a transaction, which may be waited for in another thread than it is done in."""

    db: sqlite3.Connection
    asked: bool = False
    """Whether another thread does it."""
    done: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.db.execute("COMMIT")
        except BaseException as error:
            self.failure = error
        self.done.set()

    def wait(self) -> None:
        interrupted: BaseException | None = None
        while not self.done.is_set():
            try:
                self.done.wait()
            except BaseException as stop:  # Ctrl-C; the disk is not to be left in the middle of it
                interrupted = stop
        if failure := self.failure or interrupted:
            raise failure


class _Writer:
    """A thread that does commits, one after the other, and so waits for the disk in its caller's place."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[_Commit | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._asked,), name="privet-ledger", daemon=True).start()

    def do(self, commit: _Commit) -> None:
        commit.asked = True
        self._asked.put(commit)

    def end(self) -> None:
        self._asked.put(None)


def _serve(asked: SimpleQueue[_Commit | None]) -> None:
    while (commit := asked.get()) is not None:
        commit.run()
        del commit  # and with it the connection


class Payment:
    """A charge on its way to the disk (`Ledger.begin_charge`)."""

    def __init__(self, ledger: Ledger, commit: _Commit, units: int) -> None:
        self._ledger, self._commit, self._units = ledger, commit, units

    def wait(self) -> int:
        """The units, once they are on the disk. To be called once, by the thread that began the charge.

        Raises `LedgerError` if it could not be written: then nothing was, and nothing may be released.
        """
        ledger, db = self._ledger, self._commit.db
        try:
            with ledger._explained():
                self._commit.wait()
            return self._units
        except BaseException:
            if ledger._db is db and db.in_transaction:
                db.execute("ROLLBACK")
            raise
        finally:
            ledger._lock.release()


class Ledger:
    """The account of one data set, kept in the file `path` (or only in memory: `Ledger(":memory:")`).

    Args:
        path: the file. A new one is made if there is none and `create` is true.
        dataset: a label of the data set that the file belongs to; a new file's default is its name without
            ending. A ledger with another label is refused.
        create: whether a missing file is made, or is an error.

    Formal guarantee:
        When `charge` returns, its units are on the disk, and every later reader of the file sees them,
        whatever happens to this process or to the power. So if each release waits for its own charge, then
        spent >= released at any moment, and a crash leaves at most one charge that nothing was released for.
        Totals are exact under any number of processes and threads. Units never decrease. With a budget set,
        a charge is accepted only if all that is spent with it is proven to be (epsilon, delta)-private.

    One object may be used by several threads, and by a forked child (unless it is in memory). Runs with
    different units of privacy compose to a statement about the smallest unit, the record.
    """

    path: Path
    dataset: str

    def __init__(self, path: str | Path, *, dataset: str | None = None, create: bool = True) -> None:
        self.in_memory = str(path) == ":memory:"
        self.path = Path(path) if self.in_memory else Path(path).absolute()
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._closed = ""
        self._room = _Room()
        self._writer: _Writer | None = None
        self._commit: _Commit | None = None
        """The last one that a thread was asked for."""
        if dataset == "":
            raise ConfigError("dataset = '' is no label: name the data set, or leave it out.")
        with self._explained():
            if self.in_memory:
                self._db = _connect(":memory:")
                _fill(self._db, dataset or "memory")
            elif not self.path.exists():
                if not create:
                    self._fail("does not exist. The first run that names it makes it: privet train --ledger")
                self._make_file(dataset or self.path.stem)
            elif not self.path.is_file():
                self._fail(_FOREIGN)
            (self.dataset,) = self._connection().execute("SELECT label FROM dataset").fetchone()
        if dataset not in (None, self.dataset):
            self.close()
            self._fail(
                f"belongs to the data set {self.dataset!r}, not to {dataset!r}. Name that one's ledger, by --ledger"
            )
        _ledgers.add(self)

    # What a run does

    def open_run(
        self,
        run: str,
        mechanism: Mechanism,
        *,
        unit: str = "record",
        budget: Budget | None = None,
        planned: int | None = None,
        note: str = "",
    ) -> Entry:
        """Register a run, or continue it: an equal mechanism counts on, another one is counted beside it.

        `budget`, `planned` and `note` are kept for those who read the ledger; they limit nothing here.
        """
        if not run or not unit:
            raise ConfigError(f"run = {run!r} and unit = {unit!r} must not be empty.")
        key = _text(mechanism)
        epsilon, delta = budget or (None, None)
        with self._transaction() as db:
            known = db.execute("SELECT unit FROM runs WHERE run = ?", (run,)).fetchone()
            if known not in (None, (unit,)):
                self._fail(f"has run {run} with unit {known[0]!r}, not {unit!r}. Start a new run for that unit")
            db.execute(_OPEN_RUN, (run, unit, epsilon, delta, planned, note, _now()))
            db.execute("INSERT OR IGNORE INTO entries (run, mechanism) VALUES (?, ?)", (run, key))
            (entry,) = db.execute("SELECT id FROM entries WHERE run = ? AND mechanism = ?", (run, key)).fetchone()
        return Entry(id=entry, run=run, mechanism=mechanism, key=key)

    def charge(
        self, entry: Entry, *, step: int, units: int = 1, resumed: bool = False, limit: int | None = None
    ) -> int:
        """Pay for `units` compositions of the entry's mechanism, durably, before anything of them is released.

        Returns the units paid. Steps that are done again are paid again: the first step after a checkpoint was loaded
        (`resumed`) costs at least one unit if anyone has taken that step of the run before, also if it would be free
        as a later part of a unit (`units` = 0). Raises `BudgetExceeded` if the data set's budget does not allow it, or
        if all processes that go on with this run would have paid more than `limit` units together; `LedgerError` if
        it cannot be written: then nothing was, and nothing may be released.
        """
        return self.begin_charge(entry, step=step, units=units, resumed=resumed, limit=limit).wait()

    def begin_charge(
        self, entry: Entry, *, step: int, units: int = 1, resumed: bool = False, limit: int | None = None
    ) -> Payment:
        """What `charge` does, up to waiting for the disk: that is `Payment.wait`, which must be called in any case.

        In between there is time for what releases nothing, such as drawing noise. Other threads wait as well.
        """
        step, units = operator.index(step), operator.index(units)
        if step < 0 or units < 0:
            raise ConfigError(f"step = {step} and units = {units} must not be negative.")
        while (payment := self._try_charge(entry, step, units, resumed, limit)) is None:
            pass  # ends, for what others spend meanwhile can only use the budget up
        return payment

    def _try_charge(self, entry: Entry, step: int, units: int, resumed: bool, limit: int | None) -> Payment | None:
        totals: dict[str, int] = {}
        with self._writing() as db:
            budget = _read_budget(db)
            if resumed and units == 0 and step <= (db.execute(_LAST_STEP, (entry.run,)).fetchone()[0] or 0):
                units = 1  # asked here, where no other process can take the step in between
            if limit is not None and units + (db.execute(_PAID, (entry.id,)).fetchone() or (0,))[0] > limit:
                raise BudgetExceeded(
                    f"The next step (units = {units}) would exceed the budget of run {entry.run}, so it was not taken: "
                    "another process goes on with the same run."
                )
            if budget:
                totals = dict(db.execute(_TOTALS, (None,)).fetchall())
                totals[entry.key] = totals.get(entry.key, 0) + units
            if budget is None or self._room.covers(budget, totals):
                if db.execute(_CHARGE, (units, step, _now(), entry.id, entry.run, entry.key)).rowcount != 1:
                    self._fail(f"has no run {entry.run} with this mechanism. Open the run in this ledger first")
                return self._begin_commit(db, units)
            db.execute("ROLLBACK")  # nothing was written
        # Accounting takes time, in which others may write: its answer is checked in a new transaction.
        room = _find_room(entry, budget, totals, self._room)
        if room is None:
            raise BudgetExceeded(
                f"The next step (units = {units}) would exceed the budget epsilon = {budget[0]:g} at "
                f"delta = {budget[1]:g} of the data set {self.dataset!r} in {self.path}, so it was not "
                "taken. Use what is trained so far, or have the data's owners raise the budget."
            )
        self._room = room
        return None

    def _begin_commit(self, db: sqlite3.Connection, units: int) -> Payment:
        """Has the transaction written, by a thread that waits for the disk; the ledger's lock is held until then."""
        self._commit = commit = _Commit(db)
        if self.in_memory:
            commit.run()
        else:
            if self._writer is None:
                self._writer = _Writer()
                finalize(self, self._writer.end)
            self._writer.do(commit)
        self._lock.acquire()
        return Payment(self, commit, units)

    def _settle(self) -> None:
        """Waits until no other thread is at work on the connection."""
        if self._writer is not None and self._commit is not None and self._commit.asked:
            self._commit.done.wait()

    def finish_run(self, run: str) -> None:
        """Note that the run came to its end. Opening it again takes the note back."""
        with self._transaction() as db:
            if db.execute("UPDATE runs SET finished = ? WHERE run = ?", (_now(), run)).rowcount != 1:
                self._fail(f"has no run {run!r}. Open it first")

    # The budget of the data set

    @property
    def budget(self) -> Budget | None:
        """The limit (epsilon, delta) for all runs together, if one was set."""
        with self._reading() as db:
            return _read_budget(db)

    def set_budget(self, epsilon: float, delta: float, *, force: bool = False) -> None:
        """Limit what all runs together may spend. It may be lowered freely, and raised with `force`."""
        epsilon, delta = float(epsilon), float(delta)
        if not (0 < epsilon < math.inf and 0 < delta < 1):
            raise ConfigError(
                f"epsilon = {epsilon:g} and delta = {delta:g} are no budget: epsilon must be above 0 "
                "and finite, and delta between 0 and 1."
            )
        with self._transaction() as db:
            old = _read_budget(db)
            if old and not force and (epsilon > old[0] or delta > old[1]):
                self._fail(
                    f"has the budget epsilon = {old[0]:g} at delta = {old[1]:g}; epsilon = {epsilon:g} at "
                    f"delta = {delta:g} would raise it. Pass force=True if the data's owners agree"
                )
            db.execute("UPDATE dataset SET epsilon = ?, delta = ?", (epsilon, delta))

    # What is known

    def spent(self, *, run: str | None = None) -> list[tuple[Mechanism, int]]:
        """All that is spent on the data set (or by one run): each mechanism with its count."""
        with self._reading() as db:
            totals = db.execute(_TOTALS, (run,)).fetchall()
        return [(_mechanism(key), units) for key, units in totals if units]

    def runs(self) -> list[RunRecord]:
        """Every run, the oldest first."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT runs.*, mechanism, units, last_step, charged FROM runs JOIN entries USING (run)"
                " ORDER BY runs.rowid, entries.id"
            ).fetchall()
        by_run: dict[str, list[tuple[Any, ...]]] = {}
        for row in rows:
            by_run.setdefault(row[0], []).append(row)
        return [_run_record(rows) for rows in by_run.values()]

    def last_step(self, run: str) -> int:
        """The highest step that the run has paid for; 0 if none."""
        with self._reading() as db:
            (step,) = db.execute(_LAST_STEP, (run,)).fetchone()
        return step or 0

    # The connection

    def close(self) -> None:
        """Fold the log back into the file and close it. A ledger in memory is gone then."""
        with self._lock:
            self._closed = self._closed or "is closed. Open it again"
            self._disconnect()
            if self._writer is not None:
                self._writer.end()
                self._writer = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fail(self, what: str) -> NoReturn:
        raise LedgerError(f"The ledger {self.path} {what}.")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            cause = _CAUSES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "cannot be used")
            raise LedgerError(f"The ledger {self.path} {cause} (SQLite says: {error}).") from error
        except OSError as error:
            raise LedgerError(f"The ledger {self.path} cannot be used: {error}.") from error

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._explained():
            yield self._connection()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing."""
        with self._writing() as db:
            yield db
            db.execute("COMMIT")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that is still to be ended. Alone: IMMEDIATE takes the write lock before the first read."""
        with self._reading() as db:
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db
            except BaseException:  # Ctrl-C too
                self._settle()
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def _connection(self) -> sqlite3.Connection:
        if self._closed:
            self._fail(self._closed)
        if not self.in_memory:
            identity = _identity(self.path)
            self._file = self._file or identity
            if identity != self._file:  # charges would go where no one finds them
                self._fail("was moved or replaced while it was in use. Put it back, then resume the run")
        if self._db is None:
            self._db = self._open_file()
        return self._db

    def _disconnect(self) -> None:
        self._settle()
        if self._db is not None:
            self._db.close()
            self._db = None

    def _make_file(self, label: str) -> None:
        """Make a whole ledger under another name and link it in: no one meets half of one or replaces one."""
        draft = self.path.with_name(f".{self.path.name}.{uuid4().hex}")
        try:
            with closing(_connect(str(draft))) as db:
                _fill(db, label)
                db.execute("PRAGMA journal_mode = WAL")  # stays in the file, where its file system can do it
            try:
                os.link(draft, self.path)
            except FileExistsError:
                pass  # another process was faster
            except OSError:  # no hard links here; should two be made at once, `_connection` tells the loser
                draft.rename(self.path)
        finally:
            draft.unlink(missing_ok=True)

    def _open_file(self) -> sqlite3.Connection:
        # What is not ours must stay as it is: "immutable" reads its head without locks or recovery. (Python's
        # open() would, on closing, drop the locks that other connections of this process have on the file.)
        with closing(_connect(f"{self.path.as_uri()}?mode=ro&immutable=1")) as db:
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
        if application != _APPLICATION_ID:
            self._fail(_FOREIGN)
        if version > _VERSION:
            self._fail(f"was made by a newer Privet (format {version}; known is {_VERSION}). Update Privet")
        # Read-only as well, for closing a writer would fold the log into a damaged file.
        with closing(_connect(f"{self.path.as_uri()}?mode=ro")) as db:
            if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                self._fail(_DAMAGED)
        return _connect(f"{self.path.as_uri()}?mode=rw")


def _text(mechanism: Mechanism) -> str:
    """A mechanism as the text that stands for it in the file; equal ones have equal texts."""
    return json.dumps(mechanism.to_json(), sort_keys=True)


def _mechanism(text: str) -> Mechanism:
    return Mechanism.from_json(json.loads(text))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino


def _connect(name: str) -> sqlite3.Connection:
    # Threads take turns by the ledger's own lock.
    options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False}
    db: sqlite3.Connection = sqlite3.connect(name, uri=name.startswith("file:"), timeout=_WAIT_SECONDS, **options)
    db.execute("PRAGMA synchronous = EXTRA")  # each commit is on the disk; unlike FULL, without a WAL too
    db.execute("PRAGMA fullfsync = ON")  # and on macOS
    db.execute("PRAGMA wal_autocheckpoint = 64")  # pages: what is written over is on the disk sooner
    return db


def _fill(db: sqlite3.Connection, label: str) -> None:
    db.executescript(_SCHEMA)
    db.execute("INSERT INTO dataset (id, label, created) VALUES (1, ?, ?)", (label, _now()))


def _read_budget(db: sqlite3.Connection) -> Budget | None:
    epsilon, delta = db.execute("SELECT epsilon, delta FROM dataset").fetchone()
    return None if epsilon is None else (epsilon, delta)


def _run_record(rows: list[tuple[Any, ...]]) -> RunRecord:
    """From the rows of one run, one per mechanism, as `Ledger.runs` selects them."""
    run, unit, epsilon, delta, planned, note, started, finished, *_ = rows[0]
    spent = tuple((_mechanism(key), units) for *_, key, units, _, _ in rows)
    return RunRecord(
        run=run,
        started=started,
        charged=max((row[-1] for row in rows if row[-1]), default=None),
        steps=max(row[-2] for row in rows),
        units=sum(units for _, units in spent),
        mechanism=spent[-1][0],
        spent=spent,
        unit=unit,
        budget=None if epsilon is None else (epsilon, delta),
        planned=planned,
        note=note,
        finished=finished is not None,
    )


def _find_room(entry: Entry, budget: Budget, wanted: Mapping[str, int], last: _Room) -> _Room | None:
    """How often `entry`'s mechanism fits beside the others in `wanted`; None if not as often as wanted.

    Mechanisms that moved since the `last` answer are in use by others just now. They get a share of what is
    left, else each of their steps would outdate this answer. So the accountant is asked a number of times
    that is logarithmic in the steps; only at the end for each step, so that nothing of the budget is wasted.
    """
    others = {key: units for key, units in wanted.items() if units and key != entry.key}
    need = wanted[entry.key]

    def limit_beside(others: Mapping[str, int]) -> int:
        before = [(_mechanism(key), units) for key, units in others.items()]
        return count_for(entry.mechanism, *budget, before=before)

    limit = limit_beside(others)
    if limit < need:
        return None
    moving = [key for key, units in others.items() if last.seen and units != last.seen.get(key, 0)]
    share = (limit - need) // 2 if moving else 0
    while share:
        grown = others | {key: others[key] + share for key in moving}
        beside = limit_beside(grown)
        if beside - need >= (limit - need) // 4:
            return _Room(budget=budget, limit=grown | {entry.key: beside}, seen=wanted)
        share //= 8
    return _Room(budget=budget, limit=others | {entry.key: limit}, seen=wanted)


# SQLite connections must not cross a fork, not even to be closed on the other side. So files are closed
# before it, and each side opens them when it needs them. Meanwhile their locks are held: no transaction is
# cut in two.
_ledgers: WeakSet[Ledger] = WeakSet()
_forking: list[Ledger] = []


def _before_fork() -> None:
    for ledger in sorted(_ledgers, key=id):
        ledger._lock.acquire()
        _forking.append(ledger)
        if not ledger.in_memory:
            ledger._disconnect()


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop()._lock.release()


def _after_fork_in_child() -> None:
    while _forking:
        ledger = _forking.pop()
        ledger._lock = threading.RLock()
        ledger._writer = None  # threads stay with the parent
        if ledger.in_memory:
            ledger._closed = "is in memory, so a forked process cannot charge it. Name a ledger file"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
