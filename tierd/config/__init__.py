"""The config file: sections, environment, reading and reloading it."""
