"""EMR-Merging: many fine-tunes of one base model in one folder, each to be had again by name (NeurIPS 2024)."""

from hf_ext.emr.config import EMRConfig
from hf_ext.emr.merge import add_task, extract, merge, report, verify
from hf_ext.emr.report import MergeReport, TaskReport
from hf_ext.emr.switching import task

__all__ = ["EMRConfig", "MergeReport", "TaskReport", "add_task", "extract", "merge", "report", "task", "verify"]
