"""The folder with the training's state in memory, as far as the launcher has to do with it."""
