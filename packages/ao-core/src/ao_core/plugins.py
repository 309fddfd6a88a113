from __future__ import annotations
class PluginLoader:
    def __init__(self, registry): self.registry = registry
    def load(self): pass
    def notes(self): return []
    def origin(self, t): return []
