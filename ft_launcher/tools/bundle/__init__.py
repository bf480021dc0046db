"""What of an incident may be passed on: the allow-list, a slice of the journals, the page that is read first."""
