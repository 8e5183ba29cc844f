"""Routers choose experts; balances keep the choice even. Neither knows ranks or buffers."""
