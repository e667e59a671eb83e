"""Servers of stored models: the plugins of vLLM and SGLang."""
