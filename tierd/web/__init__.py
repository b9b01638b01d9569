"""The status pages of the daemon: HTML from its reports. Nothing is loaded from elsewhere."""
