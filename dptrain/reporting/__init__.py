"""Records of a run: guarantees, reports and plots."""

from typing import TYPE_CHECKING

from dptrain._on_demand import names_of
from dptrain.reporting.left_out import bounding_note
from dptrain.reporting.metrics import read_metrics
from dptrain.reporting.plots import (
    LEAST_DELTA,
    figure_of,
    plot_attacks,
    plot_graph,
    save,
)
from dptrain.reporting.private_file import (
    MARK,
    OWNER_ONLY,
    WARNING,
    free_path,
    has_line_break,
    in_place,
    owner_only,
)
from dptrain.reporting.publication.pages import html_page, model_card, registry_record
from dptrain.reporting.publication.run_facts import RunFacts
from dptrain.reporting.publication.whole_statement import read_statement, schema
from dptrain.reporting.published_profile import as_shown, read_profile, rows_of
from dptrain.reporting.report import (
    STATEMENT,
    STATEMENT_TEXT,
    plot_curves,
    plot_privacy,
    privacy_report,
)
from dptrain.reporting.support_table import as_markdown
from dptrain.reporting.verification import Verification, verify_statement
from dptrain.reporting.weights import (
    KEY,
    TAGS,
    facts_of_weights,
    key_facts,
    save_released,
    write_weights,
)

if TYPE_CHECKING:
    from dptrain.auditing import plot_audit, plot_canaries
    from dptrain.contrib.individual import (
        GroupRow,
        GroupTable,
        IndividualReport,
        plot_active,
        plot_histogram,
    )
    from dptrain.contrib.selection import plot_composed
    from dptrain.planning import plot_plan, plot_strategies, plot_user_plan

__all__ = [
    "KEY",
    "LEAST_DELTA",
    "MARK",
    "OWNER_ONLY",
    "STATEMENT",
    "STATEMENT_TEXT",
    "TAGS",
    "WARNING",
    "GroupRow",
    "GroupTable",
    "IndividualReport",
    "RunFacts",
    "Verification",
    "as_markdown",
    "as_shown",
    "bounding_note",
    "facts_of_weights",
    "figure_of",
    "free_path",
    "has_line_break",
    "html_page",
    "in_place",
    "key_facts",
    "model_card",
    "owner_only",
    "plot_active",
    "plot_attacks",
    "plot_audit",
    "plot_canaries",
    "plot_composed",
    "plot_curves",
    "plot_graph",
    "plot_histogram",
    "plot_plan",
    "plot_privacy",
    "plot_strategies",
    "plot_user_plan",
    "privacy_report",
    "read_metrics",
    "read_profile",
    "read_statement",
    "registry_record",
    "rows_of",
    "save",
    "save_released",
    "schema",
    "verify_statement",
    "write_weights",
]

__getattr__, __dir__ = names_of(
    __name__,
    {
        "dptrain.auditing": "plot_audit plot_canaries",
        "dptrain.contrib.individual": (
            "GroupRow GroupTable IndividualReport plot_active plot_histogram"
        ),
        "dptrain.contrib.selection": "plot_composed",
        "dptrain.planning": "plot_plan plot_strategies plot_user_plan",
    },
)
