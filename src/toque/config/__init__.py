"""Configuration: a typed tree of settings, YAML files, presets and overrides, without torch.

`load_config("my.yaml", ["optim.peak_lr=1e-4"])` returns the settings and their origins.
"""

from toque.config.dump import config_sha256, resolved_yaml
from toque.config.resolve import (
    Resolved,
    load_config,
    load_text,
    presets,
    resolve_values,
)
from toque.config.schema import FilesConfig, RunConfig, SourceConfig

__all__ = [
    "FilesConfig",
    "Resolved",
    "RunConfig",
    "SourceConfig",
    "config_sha256",
    "load_config",
    "load_text",
    "presets",
    "resolve_values",
    "resolved_yaml",
]
