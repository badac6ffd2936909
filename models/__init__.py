"""The reference encoder in torch: configuration, modules, pooling. Imports nothing of tfx but errors."""
