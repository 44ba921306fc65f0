"""The ledger's promises, each tested by what would break it: kills, races, forks, full disks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import privet.ledger as module
from privet import accounting
from privet.accounting import Mechanism
from privet.errors import BudgetExceeded, ConfigError, LedgerError
from privet.ledger import Ledger

GAUSSIAN = Mechanism(kind="gaussian", noise_multiplier=20.0, relation="add_remove")
NOISIER = Mechanism(kind="gaussian", noise_multiplier=30.0, relation="add_remove")
POISSON = Mechanism(kind="poisson", noise_multiplier=1.1, relation="add_remove", rate=0.01)

# Children come from a clean process that has the imports done: killing 50 of them takes seconds.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["privet.ledger", "pytest"])


def units(path: Path) -> int:
    with Ledger(path, create=False) as ledger:
        return sum(n for _, n in ledger.spent())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.ledger"


def run_children(target: Callable[..., None], *arguments: tuple[Any, ...]) -> None:
    children = [processes.Process(target=target, args=own) for own in arguments]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0


# What is stored


def test_spending_of_all_runs_adds_up_and_survives(path: Path) -> None:
    with Ledger(path, dataset="mnist") as ledger:
        first = ledger.open_run("a", POISSON, budget=(3.0, 1e-5), planned=10, note="tuning")
        second = ledger.open_run("b", POISSON)
        third = ledger.open_run("c", GAUSSIAN, unit="user")
        for step in range(1, 5):
            ledger.charge(first, step=step)
        ledger.charge(second, step=7, units=3)
        ledger.charge(third, step=1)
        ledger.finish_run("b")
    with Ledger(path, create=False) as ledger:
        assert ledger.dataset == "mnist"
        assert ledger.spent() == [(POISSON, 7), (GAUSSIAN, 1)]
        assert ledger.spent(run="b") == [(POISSON, 3)]
        assert ledger.spent(run="nobody") == []
        a, b, c = ledger.runs()
    assert (a.run, a.steps, a.units, a.mechanism, a.unit) == ("a", 4, 4, POISSON, "record")
    assert (a.budget, a.planned, a.note, a.finished) == ((3.0, 1e-5), 10, "tuning", False)
    assert (b.steps, b.units, b.budget, b.finished) == (7, 3, None, True)
    assert c.unit == "user"
    assert a.charged is not None
    assert a.started <= a.charged
    assert a.started.endswith("+00:00")
    assert not list(path.parent.glob("*-wal"))
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_resumed_run_pays_again_for_steps_done_again(path: Path) -> None:
    with Ledger(path) as ledger:
        entry = ledger.open_run("run", POISSON)
        for step in range(1, 11):
            ledger.charge(entry, step=step)
        ledger.finish_run("run")
    with Ledger(path) as ledger:
        entry = ledger.open_run("run", POISSON)
        assert ledger.last_step("run") == 10
        for step in range(6, 9):  # from a checkpoint at step 5
            ledger.charge(entry, step=step)
        assert ledger.spent() == [(POISSON, 13)]
        assert ledger.last_step("run") == 10
        (record,) = ledger.runs()
        assert not record.finished


def test_another_mechanism_is_counted_beside_the_old_one(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.charge(ledger.open_run("run", POISSON), step=1)
        ledger.charge(ledger.open_run("run", GAUSSIAN), step=2)
        ledger.charge(ledger.open_run("run", POISSON), step=3)
        assert ledger.spent(run="run") == [(POISSON, 2), (GAUSSIAN, 1)]
        (record,) = ledger.runs()
        assert (record.units, record.steps, record.spent) == (3, 3, ((POISSON, 2), (GAUSSIAN, 1)))
        assert ledger.last_step("run") == 3
        assert ledger.last_step("nobody") == 0
        with pytest.raises(LedgerError, match="unit 'record', not 'user'"):
            ledger.open_run("run", POISSON, unit="user")


def test_nothing_lowers_what_was_spent(path: Path) -> None:
    with Ledger(path) as ledger:
        entry = ledger.open_run("run", POISSON)
        ledger.charge(entry, step=5, units=5)
        with pytest.raises(ConfigError, match="units"):
            ledger.charge(entry, step=6, units=-1)
        with pytest.raises(ConfigError, match="step"):
            ledger.charge(entry, step=-1)
        with pytest.raises(TypeError):
            ledger.charge(entry, step=6, units=0.5)  # type: ignore[arg-type]
    with sqlite3.connect(path) as db:
        for statement in (
            "UPDATE entries SET units = units - 1",
            "UPDATE entries SET mechanism = '{}'",
            "DELETE FROM entries",
        ):
            with pytest.raises(sqlite3.IntegrityError, match="what was spent"):
                db.execute(statement)
    assert units(path) == 5


def test_in_memory() -> None:
    with Ledger(":memory:", dataset="digits") as ledger:
        ledger.charge(ledger.open_run("run", POISSON), step=1)
        assert ledger.spent() == [(POISSON, 1)]
        assert ledger.dataset == "digits"
    with Ledger(":memory:") as other:
        assert other.spent() == []
    with pytest.raises(LedgerError, match="closed"):
        ledger.spent()


def test_commits_wait_for_the_disk(path: Path) -> None:
    with Ledger(path) as ledger:
        db = ledger._connection()
        assert db.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# Files that cannot be used


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def _scribble(path: Path, table: str = "entries") -> None:
    db = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
    (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    db.close()
    data = bytearray(path.read_bytes())
    data[4096 * (page - 1) : 4096 * page] = b"\xa5" * 4096
    path.write_bytes(data)


def _foreign(path: Path) -> None:
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE entries (units)")
    db.commit()
    db.close()


def _newer(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_text("epsilon = 3\n" * 100), "not a Privet ledger"),
        (lambda path: path.write_bytes(b""), "not a Privet ledger"),
        (_foreign, "not a Privet ledger"),
        (_newer, "newer Privet"),
        (_truncate, "damaged"),
        (_scribble, "damaged"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_and_kept(path: Path, spoil: Callable[[Path], None], says: str) -> None:
    with Ledger(path) as ledger:
        ledger.charge(ledger.open_run("run", POISSON), step=1)
    spoil(path)
    before = path.read_bytes()
    for create in (True, False):
        with pytest.raises(LedgerError, match=says) as caught:
            Ledger(path, create=create)
        assert str(path) in str(caught.value)
    assert path.read_bytes() == before


def test_a_damaged_file_is_not_changed_by_its_log(path: Path) -> None:
    crashed = path.with_name("crashed.ledger")
    with Ledger(path) as ledger:
        ledger.charge(ledger.open_run("run", POISSON), step=1)
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{crashed}{suffix}")
    _scribble(crashed, "dataset")
    before = crashed.read_bytes()
    with pytest.raises(LedgerError, match="damaged"):
        Ledger(crashed)
    assert crashed.read_bytes() == before


def test_the_ledger_of_another_data_set_is_refused(path: Path) -> None:
    Ledger(path, dataset="mnist").close()
    with pytest.raises(LedgerError, match="'mnist', not to 'cifar10'"):
        Ledger(path, dataset="cifar10")
    Ledger(path, dataset="mnist").close()
    Ledger(path).close()
    with Ledger(path.with_name("adult.ledger")) as named_by_its_file:
        assert named_by_its_file.dataset == "adult"


def test_a_missing_file_or_folder_is_refused(path: Path) -> None:
    with pytest.raises(LedgerError, match=r"does not exist.*privet train"):
        Ledger(path, create=False)
    assert not path.exists()
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger(path.parent / "nowhere" / "data.ledger")
    with pytest.raises(LedgerError, match="not a Privet ledger"):
        Ledger(path.parent)


@pytest.mark.parametrize("name", ["a b?c#d%20.ledger", "é.ledger"])
def test_odd_file_names(tmp_path: Path, name: str) -> None:
    Ledger(tmp_path / name, dataset="x").close()
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_ledger_that_is_moved_away_takes_no_charge(path: Path) -> None:
    with Ledger(path) as ledger:
        entry = ledger.open_run("run", POISSON)
        path.rename(path.with_name("elsewhere"))
        with pytest.raises(LedgerError, match="moved or replaced"):
            ledger.charge(entry, step=1)
        path.with_name("elsewhere").rename(path)
        ledger.charge(entry, step=1)
    assert units(path) == 1


def test_an_entry_of_another_ledger_is_refused(path: Path) -> None:
    with Ledger(path) as ledger, Ledger(":memory:") as other:
        ledger.open_run("mine", POISSON)
        with pytest.raises(LedgerError, match="no run theirs"):
            ledger.charge(other.open_run("theirs", POISSON), step=1)
        with pytest.raises(LedgerError, match="no run 'theirs'"):
            ledger.finish_run("theirs")
        assert ledger.spent() == []


# Charges that are waited for later


def test_others_wait_for_a_payment_that_was_begun(path: Path) -> None:
    with Ledger(path) as ledger:
        entry, found = ledger.open_run("run", POISSON), []
        payment = ledger.begin_charge(entry, step=1, units=2)
        other = threading.Thread(target=lambda: found.append(ledger.charge(entry, step=2)))
        other.start()
        other.join(0.1)
        assert not found
        assert payment.wait() == 2
        other.join(10)
        assert found == [1]
    assert units(path) == 3


def test_a_payment_that_was_waited_for_is_seen_by_other_processes(path: Path) -> None:
    with Ledger(path) as ledger:
        entry = ledger.open_run("run", POISSON)
        for step in range(1, 100):  # the log is folded into the file in between
            assert ledger.begin_charge(entry, step=step).wait() == 1
            assert units(path) == step


def writers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "privet-ledger"}


def test_the_thread_that_writes_ends_with_its_ledger(path: Path) -> None:
    def charged(step: int) -> tuple[Ledger, threading.Thread]:
        before = writers()  # those of other tests may be about to end
        ledger = Ledger(path)
        ledger.charge(ledger.open_run("run", POISSON), step=step)
        (own,) = writers() - before
        return ledger, own

    ledger, own = charged(step=1)
    ledger.close()
    own.join(timeout=10)
    assert not own.is_alive()
    ledger, own = charged(step=2)
    del ledger
    gc.collect()
    own.join(timeout=10)
    assert not own.is_alive()


def test_a_payment_that_was_begun_is_written_before_the_ledger_is_closed(path: Path) -> None:
    ledger = Ledger(path)
    payment = ledger.begin_charge(ledger.open_run("run", POISSON), step=1)
    ledger.close()
    assert payment.wait() == 1 and units(path) == 1


# Charges that cannot be written


def test_a_read_only_ledger_takes_no_charge(path: Path) -> None:
    with Ledger(path) as ledger:
        entry = ledger.open_run("run", POISSON)
        ledger._connection().execute("PRAGMA query_only = ON")
        with pytest.raises(LedgerError, match="cannot be written"):
            ledger.charge(entry, step=1)
        assert ledger.spent() == []


def test_a_write_protected_file_is_read_but_takes_no_charge(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("the superuser may write to anything")
    with Ledger(path) as ledger:
        entry = ledger.open_run("run", POISSON)
    path.chmod(0o444)
    with Ledger(path) as ledger:
        assert ledger.spent() == []
        with pytest.raises(LedgerError, match="cannot be written"):
            ledger.charge(entry, step=1)


def test_a_ledger_that_another_process_holds_takes_no_charge(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.05)
    with Ledger(path) as ledger:
        entry = ledger.open_run("run", POISSON)
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="another process"):
            ledger.charge(entry, step=1)
        db.execute("ROLLBACK")
        db.close()
        ledger.charge(entry, step=1)
        assert ledger.spent() == [(POISSON, 1)]


def test_a_full_disk_leaves_nothing_half_written(path: Path) -> None:
    resource = pytest.importorskip("resource")
    with Ledger(path) as ledger:
        entry = ledger.open_run("run", POISSON)
        ledger.charge(entry, step=1)
        size = path.with_name(path.name + "-wal").stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        written = 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10_000, hard))
        try:
            with pytest.raises(LedgerError, match="disk"):
                for step in range(2, 50):
                    ledger.charge(entry, step=step)
                    written += 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert 1 < written < 49
        assert ledger.spent() == [(POISSON, written)]
        assert units(path) == written
        ledger.charge(entry, step=written + 1)  # goes on when there is space again
    assert units(path) == written + 1


def test_a_full_database_registers_no_half_run(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger._connection().execute("PRAGMA max_page_count = 1")  # no page beyond those it has
        with pytest.raises(LedgerError, match="disk is full"):
            ledger.open_run("run", POISSON, note="x" * 100_000)
        assert ledger.runs() == []


class _Interrupted:
    """A connection on which Ctrl-C arrives after the statement that starts with `at`."""

    def __init__(self, db: sqlite3.Connection, at: str) -> None:
        self.db, self.at = db, at

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        result = self.db.execute(statement, *arguments)
        if statement.strip().startswith(self.at):
            raise KeyboardInterrupt
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)


@pytest.mark.parametrize(("at", "paid"), [("BEGIN", 0), ("UPDATE", 0), ("COMMIT", 1)])
def test_ctrl_c_inside_a_charge_leaves_all_or_nothing(path: Path, at: str, paid: int) -> None:
    with Ledger(path) as ledger, Ledger(path) as other:
        entry = ledger.open_run("run", POISSON)
        db = ledger._connection()
        ledger._db = _Interrupted(db, at)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            ledger.charge(entry, step=1)
        ledger._db = db
        assert not db.in_transaction
        other.charge(other.open_run("run", POISSON), step=1)  # would wait for 30 s if the first still held the lock
        ledger.charge(entry, step=2)
        assert ledger.spent() == [(POISSON, paid + 2)]


# Several at once


def _charge_often(path: Path, start: float) -> None:
    time.sleep(max(0.0, start - time.time()))  # all make the file at the same moment
    with Ledger(path, dataset="shared") as ledger:
        entry = ledger.open_run("shared", POISSON)
        for step in range(1, 51):
            ledger.charge(entry, step=step)


def test_no_charge_is_lost_between_processes(path: Path) -> None:
    run_children(_charge_often, *[(path, time.time() + 1.5)] * 4)
    assert units(path) == 200
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_no_charge_is_lost_between_threads(path: Path) -> None:
    with Ledger(path) as ledger:
        entry = ledger.open_run("run", POISSON)

        def charge() -> None:
            for step in range(50):
                ledger.charge(entry, step=step)

        threads = [threading.Thread(target=charge) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ledger.spent() == [(POISSON, 200)]


def test_a_forked_child_has_its_own_connection(path: Path) -> None:
    ledger, memory = Ledger(path), Ledger(":memory:")
    entry, volatile = ledger.open_run("run", POISSON), memory.open_run("run", POISSON)
    ledger.charge(entry, step=1)
    connection = ledger._connection()
    child = os.fork()
    if child == 0:
        try:
            ledger.charge(entry, step=2)
            memory.charge(volatile, step=1)  # would be lost
        except LedgerError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert ledger._connection() is not connection
    ledger.charge(entry, step=3)
    memory.charge(volatile, step=1)
    assert ledger.spent() == [(POISSON, 3)]
    assert memory.spent() == [(POISSON, 1)]
    ledger.close()


def _charge_once(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.charge(ledger.open_run("child", POISSON), step=1)


def test_opening_a_ledger_twice_keeps_the_locks_of_the_first(path: Path) -> None:
    # Closing any handle of a file drops a process's POSIX locks on it. Without them the child takes itself
    # for the last user, removes the log, and what the first ledger charges later goes nowhere.
    with Ledger(path) as ledger:
        entry = ledger.open_run("run", POISSON)
        ledger.charge(entry, step=1)
        Ledger(path).close()
        run_children(_charge_once, (path,))
        ledger.charge(entry, step=2)
        copy = path.with_name("copy.ledger")  # what another process would find
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
        assert units(copy) == 3


# Kills


def _release(path: Path, released: Path) -> None:
    """A run that pays, then releases; resumed where the ledger says."""
    with Ledger(path) as ledger, released.open("a") as file:
        entry = ledger.open_run("run", POISSON)
        for step in count(ledger.last_step("run") + 1):
            ledger.charge(entry, step=step)
            time.sleep(0.003)  # a kill must be able to fall between the two, on either side
            file.write(f"released {step}\n")
            file.flush()
            time.sleep(0.003)


def _kill_often(path: Path, kills: int) -> None:
    released = path.with_name("released")
    released.touch()
    delays = random.Random(kills)
    spent = lines = 0
    for _ in range(kills):
        child = processes.Process(target=_release, args=(path, released))
        size = released.stat().st_size
        child.start()
        while released.stat().st_size == size:
            assert child.is_alive()
            time.sleep(0.001)
        time.sleep(delays.uniform(0, 0.06))
        child.kill()
        child.join()
        spent, old_spent = units(path), spent
        lines, old_lines = released.read_text().count("\n"), lines
        assert 0 <= (spent - old_spent) - (lines - old_lines) <= 1
    assert spent >= lines > kills


def test_a_kill_never_leaves_less_than_was_released(path: Path) -> None:
    _kill_often(path, 5)


@pytest.mark.slow
def test_many_kills_never_leave_less_than_was_released(path: Path) -> None:
    _kill_often(path, 60)


# The budget


def test_the_budget_stops_before_it_is_exceeded(path: Path) -> None:
    """Two runs with different mechanisms interleave on one file; neither may take the step that exceeds."""
    epsilon, delta = 1.0, 1e-5
    with Ledger(path) as one, Ledger(path) as two:
        one.set_budget(epsilon, delta)
        assert two.budget == (epsilon, delta)
        going = [(one, one.open_run("one", GAUSSIAN)), (two, two.open_run("two", NOISIER))]
        for step in count(1):
            for ledger, entry in list(going):
                before = units(path)
                try:
                    ledger.charge(entry, step=step)
                    assert units(path) == before + 1
                except BudgetExceeded:
                    assert units(path) == before
                    going.remove((ledger, entry))
            if not going:
                break
        spent = one.spent()
    assert step > 10
    assert accounting.epsilon(spent, delta).epsilon <= epsilon
    for mechanism in (GAUSSIAN, NOISIER):  # and nothing of it was left over
        assert accounting.epsilon([*spent, (mechanism, 1)], delta).epsilon > epsilon


class _Late(_Interrupted):
    """A connection that gets the write lock only after another process has used its time for `act`."""

    def __init__(self, db: sqlite3.Connection, act: Callable[[], None]) -> None:
        super().__init__(db, "never")
        self.act = act

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        if statement.startswith("BEGIN"):
            self.act()
        return super().execute(statement, *arguments)


@pytest.mark.parametrize("when", ["before the lock", "while accounting"])
def test_what_others_spend_meanwhile_counts(path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    budget = (1.0, 1e-5)
    limit = accounting.count_for(GAUSSIAN, *budget)
    with Ledger(path) as one, Ledger(path) as two:
        one.set_budget(*budget)
        mine, theirs = one.open_run("one", GAUSSIAN), two.open_run("two", GAUSSIAN)
        one.charge(mine, step=1, units=limit - 2)
        one.charge(mine, step=2)

        def spend_the_rest() -> None:
            if sum(n for _, n in two.spent()) < limit:
                two.charge(theirs, step=1)

        def count_meanwhile(*arguments: Any, **options: Any) -> int:
            spend_the_rest()
            return accounting.count_for(*arguments, **options)

        db = one._connection()
        if when == "before the lock":
            one._db = _Late(db, spend_the_rest)  # type: ignore[assignment]
        else:
            two.charge(theirs, step=1, units=0)  # has its answer from the accountant
            one._room = module._Room()  # has none
            monkeypatch.setattr(module, "count_for", count_meanwhile)
        with pytest.raises(BudgetExceeded):
            one.charge(mine, step=3)
        one._db = db
        assert one.spent() == [(GAUSSIAN, limit)]


def test_the_last_step_that_fits_is_taken(path: Path) -> None:
    limit = accounting.count_for(POISSON, 1.0, 1e-5)
    with Ledger(path) as ledger:
        ledger.set_budget(1.0, 1e-5)
        ledger.charge(ledger.open_run("run", POISSON), step=1, units=limit - 1)
    with Ledger(path) as ledger:
        entry = ledger.open_run("another", POISSON)
        ledger.charge(entry, step=1)
        with pytest.raises(BudgetExceeded):
            ledger.charge(entry, step=2)
        ledger.charge(entry, step=2, units=0)  # a step that costs nothing, as in the middle of an epoch
        assert ledger.spent() == [(POISSON, limit)]
        assert ledger.last_step("another") == 2


def test_accounting_is_asked_rarely(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(*arguments: Any, **options: Any) -> int:
        asked.append(arguments)
        return accounting.count_for(*arguments, **options)

    monkeypatch.setattr(module, "count_for", counted)
    with Ledger(path) as one, Ledger(path) as two:
        one.set_budget(8.0, 1e-5)
        first = one.open_run("one", GAUSSIAN)
        for step in range(100):
            one.charge(first, step=step)
        assert len(asked) == 1
        second = two.open_run("two", NOISIER)
        for step in range(100):
            one.charge(first, step=step)
            two.charge(second, step=step)
        assert len(asked) < 20


def _charge_until_refused(path: Path, noise: float) -> None:
    mechanism = Mechanism(kind="gaussian", noise_multiplier=noise, relation="add_remove")
    with Ledger(path) as ledger:
        entry = ledger.open_run(f"run {os.getpid()}", mechanism)
        with pytest.raises(BudgetExceeded):
            for step in count(1):
                ledger.charge(entry, step=step)


def test_the_budget_holds_between_processes(path: Path) -> None:
    epsilon, delta = 1.0, 1e-5
    with Ledger(path) as ledger:
        ledger.set_budget(epsilon, delta)
        run_children(_charge_until_refused, (path, 20.0), (path, 20.0), (path, 30.0), (path, 30.0))
        spent = ledger.spent()
    assert accounting.epsilon(spent, delta).epsilon <= epsilon
    assert accounting.epsilon([*spent, (NOISIER, 1)], delta).epsilon > epsilon


def test_a_budget_is_raised_only_by_force(path: Path) -> None:
    with Ledger(path) as ledger, Ledger(path) as other:
        assert (ledger.budget, ledger.dataset) == (None, "data")
        entry = ledger.open_run("run", GAUSSIAN)
        ledger.charge(entry, step=1, units=5)
        ledger.set_budget(3.0, 1e-5)
        ledger.charge(entry, step=2)
        for higher in ((3.1, 1e-5), (1.0, 1e-4)):
            with pytest.raises(LedgerError, match="force=True"):
                ledger.set_budget(*higher)
        assert ledger.budget == (3.0, 1e-5)
        other.set_budget(0.01, 1e-5)  # below what is spent: nothing more is possible, in any process
        with pytest.raises(BudgetExceeded, match=r"epsilon = 0.01"):
            ledger.charge(entry, step=3)
        other.set_budget(3.1, 1e-5, force=True)
        ledger.charge(entry, step=3)
        assert ledger.spent() == [(GAUSSIAN, 7)]


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 1e-5), (-1, 1e-5), (float("nan"), 1e-5), (1, 0), (1, 1)])
def test_an_impossible_budget_is_refused(epsilon: float, delta: float) -> None:
    with Ledger(":memory:") as ledger, pytest.raises(ConfigError, match="epsilon"):
        ledger.set_budget(epsilon, delta)
