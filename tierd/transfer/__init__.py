"""Operations on whole checkpoints: fetch, verify, repair, drill, and atomic output."""
