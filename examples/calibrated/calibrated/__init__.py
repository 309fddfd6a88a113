"""What calibrated algorithms cost a model, beside rounding to nearest: a table, measured cell by cell."""
