//! What a peer's metrics mean, for `# HELP` at `/metrics` and for docs/metrics.md.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

/// What a metric's value does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// It grows.
    Counter,
    /// It goes up and down.
    Gauge,
    /// It has quantiles, a sum and a count.
    Histogram,
}

const TABLE: [(&str, Kind, Unit, &str); 17] = [
    ("metrale_peer_requests_total", Kind::Counter, Unit::Count, "requests answered, by status"),
    ("metrale_peer_bytes_total", Kind::Counter, Unit::Bytes, "bytes of records sent"),
    (
        "metrale_peer_request_seconds",
        Kind::Histogram,
        Unit::Seconds,
        "from a request's header to the last byte of its record handed to the system",
    ),
    (
        "metrale_peer_fallbacks_total",
        Kind::Counter,
        Unit::Count,
        "ways of sending that were given up for a slower one: `sendfile`, where the file system has \
         none, and `direct`, once for each connection that got no memory for direct reads",
    ),
    (
        "metrale_peer_refusals_total",
        Kind::Counter,
        Unit::Count,
        "connections refused or ended for breaking the protocol, by status",
    ),
    ("metrale_peer_clients", Kind::Gauge, Unit::Count, "clients attached"),
    ("metrale_peer_connections", Kind::Gauge, Unit::Count, "connections open, attached or not"),
    (
        "metrale_peer_pushes_total",
        Kind::Counter,
        Unit::Count,
        "requests for spilled records answered, by status",
    ),
    ("metrale_peer_push_bytes_total", Kind::Counter, Unit::Bytes, "bytes of spilled records sent"),
    (
        "metrale_peer_push_read_errors_total",
        Kind::Counter,
        Unit::Count,
        "reads of spilled records that failed",
    ),
    (
        "metrale_peer_push_lanes_broken_total",
        Kind::Counter,
        Unit::Count,
        "clients' queue pairs for spilled records that broke, or whose client broke the protocol",
    ),
    (
        "metrale_peer_push_lanes",
        Kind::Gauge,
        Unit::Count,
        "clients' queue pairs for spilled records",
    ),
    (
        "metrale_peer_push_queue",
        Kind::Gauge,
        Unit::Count,
        "requests for spilled records that wait or are being read",
    ),
    ("metrale_peer_promotions_total", Kind::Counter, Unit::Count, "records brought into memory"),
    ("metrale_peer_demotions_total", Kind::Counter, Unit::Count, "records taken out of memory"),
    (
        "metrale_peer_resident_records",
        Kind::Gauge,
        Unit::Count,
        "records in memory that clients can READ",
    ),
    (
        "metrale_peer_withdrawn_records",
        Kind::Gauge,
        Unit::Count,
        "records whose copy on disk is damaged",
    ),
];

/// Tells the exporter that is installed what the peer's metrics mean.
pub(crate) fn describe() {
    for (name, kind, unit, help) in TABLE {
        match kind {
            Kind::Counter => describe_counter!(name, unit, help),
            Kind::Gauge => describe_gauge!(name, unit, help),
            Kind::Histogram => describe_histogram!(name, unit, help),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documents_list_every_metric_with_its_meaning() {
        let document = include_str!("../../docs/metrics.md");
        for (name, kind, _, help) in TABLE {
            let kind = format!("{kind:?}").to_lowercase();
            let (row, ending) = (format!("| `{name}` | {kind} |"), format!("| {help} |"));
            let found = document.lines().any(|l| l.starts_with(&row) && l.ends_with(&ending));
            assert!(found, "docs/metrics.md lacks a row {row} ... {ending}");
        }
    }
}
