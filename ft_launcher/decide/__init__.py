"""Evidence and history in, decisions out. Pure: the ground that every other wing stands on."""
