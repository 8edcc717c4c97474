"""Routes for operators: live control, expert recordings, status, metrics."""
