"""The logger of the whole client, `tierd_client`. An application sets its level and its handlers."""

import logging

log = logging.getLogger("tierd_client")
