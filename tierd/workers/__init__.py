"""What moves bytes: each worker is one arrow of the picture. Asks lifecycle, uses tiers, records in the catalog."""
