"""The groups of the config, named once: they need neither torch nor Hydra."""

PARTS = ("dataset", "partition", "model", "method", "aggregator", "engine", "observer")
"""Groups whose options become objects; the config has a node of the same name for each."""

GROUPS = (*PARTS, "experiment", "scale")
"""All groups: the parts, and presets, whose options only choose parts and set values."""
