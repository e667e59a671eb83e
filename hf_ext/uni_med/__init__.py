"""Uni-Med: one model for medical images and text, with a mixture of experts as its connector (NeurIPS 2024)."""

from hf_ext.uni_med.boxes import box_iou, format_box, parse_boxes
from hf_ext.uni_med.conversion import Converted, convert_checkpoint
from hf_ext.uni_med.data import RATIOS, UniMedCollator, mix_datasets
from hf_ext.uni_med.evaluation import Evaluation, accuracy, answer, bleu1, box_ious, evaluate, scores
from hf_ext.uni_med.interference import FeatureMap, Interference, InterferenceCallback, feature_map, interference

__all__ = [
    "Converted",
    "Evaluation",
    "FeatureMap",
    "Interference",
    "InterferenceCallback",
    "RATIOS",
    "UniMedCollator",
    "accuracy",
    "answer",
    "bleu1",
    "box_iou",
    "box_ious",
    "convert_checkpoint",
    "evaluate",
    "feature_map",
    "format_box",
    "interference",
    "mix_datasets",
    "parse_boxes",
    "scores",
]
