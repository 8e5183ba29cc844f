"""Dispatchers move token rows to the ranks that own their experts, and back. One file and one YAML each."""
