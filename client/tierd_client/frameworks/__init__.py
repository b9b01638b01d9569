"""tierd as the users of a framework expect it. Each file needs its framework; importing this folder imports none."""
