"""What calibrated algorithms cost a model, beside rounding to nearest: the cells of a table, measured one by one."""
