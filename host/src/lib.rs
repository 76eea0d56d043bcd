//! Ansatz.
