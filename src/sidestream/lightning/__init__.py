"""The only folder that imports Lightning: module, strategy, data module, callbacks, loggers."""
