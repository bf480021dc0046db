"""The report on a job: the events of its journals in; figures, advice, text, page and trace out."""
