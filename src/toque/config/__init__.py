"""The configuration: one typed tree, YAML files, presets and overrides. Never imports torch.

`load_config("my.yaml", ["optim.peak_lr=1e-4"])` gives the settings and where each came from.
"""

from toque.config.dump import config_sha256, resolved_yaml
from toque.config.resolve import Resolved, load_config, presets, resolve_values
from toque.config.schema import FilesConfig, RunConfig, SourceConfig

__all__ = [
    "FilesConfig",
    "Resolved",
    "RunConfig",
    "SourceConfig",
    "config_sha256",
    "load_config",
    "presets",
    "resolve_values",
    "resolved_yaml",
]
