"""Adapters of PEFT, as files and as models: merged into their base, checked, and attached where they load."""
