"""A guarantee that is measured: checks that every sound method passes and every known fault fails.

    report = privet.audit.audit(privet.PerExample(clip=1.0), model, (inputs, targets))
    assert report.holds, report

The checks know a method only through what it declares: `Subject` is all that they see. What each one finds, and which
faults were put in to see that it does, is in docs/results/audit.md.
"""

from .membership import MembershipReport, infer_membership
from .method import assert_private, audit, audit_subject, check_layers
from .one_run import OneRun, audit_in_one_run
from .report import Check, Report
from .run import audit_run
from .subject import Desk, Loss, MethodSubject, Outcome, Record, Subject, Tape

__all__ = [
    "Check",
    "Desk",
    "Loss",
    "MembershipReport",
    "MethodSubject",
    "OneRun",
    "Outcome",
    "Record",
    "Report",
    "Subject",
    "Tape",
    "assert_private",
    "audit",
    "audit_in_one_run",
    "audit_run",
    "audit_subject",
    "check_layers",
    "infer_membership",
]
