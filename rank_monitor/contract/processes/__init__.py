"""Starting, awaiting and ending the processes that stand beside ranks; bounds on what they may open."""
