"""Plotly figures of query results. No Streamlit, no database: arrays in, a figure out."""
