"""HTTP layer below every API: connections, limits, authentication, bodies, errors."""
