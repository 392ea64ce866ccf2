//! One module per subcommand: its arguments, and `run`.

pub(crate) mod bench;
pub(crate) mod fetch;
pub(crate) mod peer;
