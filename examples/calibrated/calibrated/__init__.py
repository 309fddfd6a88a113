"""What calibrated algorithms cost a model, compared with rounding to nearest: a table, cell by cell."""
