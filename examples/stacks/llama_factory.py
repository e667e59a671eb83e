"""LLaMA-Factory with compressed checkpoints: python examples/stacks/llama_factory.py examples/stacks/llama_factory.yaml"""

import sys

import yaml
from llamafactory.train.tuner import run_exp

from hf_ext.fm_delta import CompressCheckpoints

with open(sys.argv[1], encoding="utf-8") as file:
    run_exp(yaml.safe_load(file), callbacks=[CompressCheckpoints()])
