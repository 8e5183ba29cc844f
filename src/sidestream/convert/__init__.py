"""Weights in and out: Hugging Face checkpoints of Mixtral, OLMoE and Qwen3-MoE."""
