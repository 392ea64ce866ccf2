//! libibverbs, the devices it finds, their ports, and which of them rails would use.

use std::io;
use std::path::Path;
use std::sync::Arc;

use gpu_sys::verbs::{Context, FilePages, Library, ProtectionDomain, VerbsError, probe_file_pages};
use railset::choose::{Asker, RailSpec, Wish, choose};
use railset::driver;
use railset::facts::{DeviceFacts, LinkLayer, Mtu, PortFacts, PortState};

use super::report::{Report, Status, bit_rate};
use super::{Local, Settings, USE_TCP};

/// Where the kernel lists RDMA devices, whether libibverbs knows them or not.
const SYSFS: &str = "/sys/class/infiniband";
/// GIDs of a port that are shown; there may be hundreds.
const SHOWN_GIDS: usize = 6;
/// Bytes of an interface's MTU that carry the largest RDMA packets: 4096 and their headers.
const JUMBO_MTU: u32 = 4200;

/// A device that could be opened.
struct Device {
    context: Arc<Context>,
    facts: DeviceFacts,
}

pub(super) fn check(report: &mut Report, settings: &Settings) -> Local {
    let absent = settings.rails.absent();
    let library = match Library::open() {
        Ok(library) => library,
        Err(error) => {
            let fix = format!(
                "install rdma-core 17 or later (Debian and Ubuntu: libibverbs1 and \
                 ibverbs-providers), or {USE_TCP}"
            );
            let found = format!("rdma-verbs is not available: {}", reason(&error));
            report.say(absent, "libibverbs", found, fix);
            return Local::default();
        }
    };
    report.ok("libibverbs", "opened");
    let devices = devices(report, &library, absent);
    for device in &devices {
        for port in &device.facts.ports {
            check_port(report, settings, device, port);
        }
    }
    if devices.is_empty() {
        return Local::default();
    }
    let facts: Vec<_> = devices.iter().map(|device| device.facts.clone()).collect();
    let usable_rails = distinct_rails(report, &facts);
    let first = choices(report, settings, &facts);
    file_pages(report, &devices, first.as_ref(), settings.store.as_deref());
    Local { usable_rails }
}

/// What went wrong, without the advice that the error itself has.
fn reason(error: &VerbsError) -> String {
    match error {
        VerbsError::NoLibrary { library, reason } => {
            format!("{library} cannot be opened ({reason})")
        }
        error => error.to_string(),
    }
}

/// Every device that can be opened.
fn devices(report: &mut Report, library: &Arc<Library>, absent: Status) -> Vec<Device> {
    let name = "RDMA devices";
    let listed = match library.devices() {
        Ok(listed) => listed,
        Err(error) => {
            let fix = format!("see `ibv_devices` and the kernel's log, or {USE_TCP}");
            report.say(absent, name, error.to_string(), fix);
            return Vec::new();
        }
    };
    let is_listed = |name: &String| listed.iter().any(|device| device.name == *name);
    match in_kernel(Path::new(SYSFS)) {
        Err(error) => {
            let found = format!("{SYSFS} cannot be read: {error}");
            let fix = "allow reading /sys, which tells GIDs' kinds and interfaces: without it none \
                can carry a rail";
            report.say(absent, name, found, fix);
        }
        Ok(names) if !names.iter().all(is_listed) => {
            let unlisted: Vec<_> = names.into_iter().filter(|name| !is_listed(name)).collect();
            let found = format!("the kernel has {}, libibverbs does not", unlisted.join(", "));
            let fix = "install ibverbs-providers; in a container pass /dev/infiniband through";
            report.say(absent, name, found, fix);
        }
        Ok(_) if listed.is_empty() => {
            let fix = format!(
                "load the adapter's driver (`ibv_devices` then lists it), in a container pass \
                 /dev/infiniband through, or {USE_TCP}"
            );
            report.say(absent, name, "rdma-verbs is not available: there is no device", fix);
        }
        Ok(_) => {}
    }
    let mut opened = Vec::new();
    for device in &listed {
        let facts = library
            .open_device(&device.name)
            .and_then(|context| Ok(Device { facts: driver::facts(&context)?, context }));
        match facts {
            Ok(device) => opened.push(device),
            Err(error) => {
                let fix = "allow reading and writing /dev/infiniband/uverbs* (group rdma, or root)";
                report.say(absent, device.name.clone(), error.to_string(), fix);
            }
        }
    }
    if !opened.is_empty() {
        let names: Vec<_> = opened.iter().map(describe_device).collect();
        report.ok(name, format!("{}: {}", names.len(), names.join(", ")));
    }
    opened
}

/// The devices that the kernel lists in `sysfs`, in order; none where it has no such directory.
fn in_kernel(sysfs: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(sysfs) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn describe_device(device: &Device) -> String {
    let DeviceFacts { name, numa_node, initiator_depth, .. } = &device.facts;
    let node = numa_node.map_or_else(String::new, |node| format!(", NUMA node {node}"));
    format!("{name} ({initiator_depth} READs outstanding per queue pair{node})")
}

fn check_port(report: &mut Report, settings: &Settings, device: &Device, port: &PortFacts) {
    let name = format!("{} port {}", device.facts.name, port.number);
    let found = describe_port(port);
    // What the kernel says of the GIDs comes first: it is the interface that carries them.
    let named = port.gids.iter().find_map(|gid| gid.netdev.clone());
    let interface = named.or_else(|| device.context.interfaces().into_iter().next());
    let interface = interface.unwrap_or_else(|| "INTERFACE".into());
    if port.state != PortState::Active {
        let facts = std::slice::from_ref(&device.facts);
        let is_wished = |wish: &Wish| wish.device.is_some() && wish.is_for(&facts[0], facts);
        let wished = settings.wishes.rails.iter().any(is_wished);
        let status = if wished { Status::Fail } else { Status::Warn };
        return report.say(status, name, found, state_fix(port, &interface));
    }
    if port.gids.is_empty() {
        let fix = format!("give its interface an address (ip addr add ADDRESS dev {interface})");
        return report.warn(name, found, fix);
    }
    if port.link_layer == LinkLayer::Ethernet && port.active_mtu < Mtu::B4096 {
        let fix = format!(
            "set the MTU to {JUMBO_MTU} or more at both ends and at the switch (ip link set \
             {interface} mtu {JUMBO_MTU}): fewer packets for the same bytes"
        );
        return report.warn(name, found, fix);
    }
    report.ok(name, found);
}

fn state_fix(port: &PortFacts, interface: &str) -> String {
    match (port.link_layer, port.state) {
        (LinkLayer::InfiniBand, PortState::Initialising | PortState::Armed) => {
            "start a subnet manager (opensm), on one machine of the fabric or on the switch".into()
        }
        (LinkLayer::InfiniBand, _) => "connect the cable at both ends, and see `ibstat`".into(),
        (LinkLayer::Ethernet, _) => format!(
            "bring its interface up (ip link set {interface} up), and connect the cable at both ends"
        ),
    }
}

fn describe_port(port: &PortFacts) -> String {
    let PortFacts { state, link_layer, active_mtu, bits_per_s, gids, lid, .. } = port;
    let speed = bits_per_s
        .map_or_else(|| "speed not told".to_owned(), |bits_per_s| bit_rate(bits_per_s as f64));
    let lid = match link_layer {
        LinkLayer::InfiniBand => format!(", LID {lid}"),
        LinkLayer::Ethernet => String::new(),
    };
    let shown: Vec<_> = gids
        .iter()
        .take(SHOWN_GIDS)
        .map(|gid| {
            let on = gid.netdev.as_ref().map_or_else(String::new, |netdev| format!(" on {netdev}"));
            format!("GID {} {} {}{on}", gid.index, gid.gid, gid.kind)
        })
        .collect();
    let shown = if shown.is_empty() { "no GID".to_owned() } else { shown.join(", ") };
    let more = match gids.len().saturating_sub(SHOWN_GIDS) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{state}, {link_layer}{lid}, {speed}, MTU {active_mtu}; {shown}{more}")
}

/// The best end of a rail on each port, those of them that are one counted once.
fn distinct_rails(report: &mut Report, facts: &[DeviceFacts]) -> usize {
    let alone = |device: &DeviceFacts, port: &PortFacts| {
        let device = DeviceFacts { ports: vec![port.clone()], ..device.clone() };
        choose(&[device], Asker::Rail1, &Wish::default(), None, None).ok()
    };
    let mut distinct: Vec<RailSpec> = Vec::new();
    for device in facts {
        for spec in device.ports.iter().filter_map(|port| alone(device, port)) {
            let spec = spec.spec;
            match distinct.iter().find(|other| other.identity().is_same(&spec.identity())) {
                None => distinct.push(spec),
                Some(other) => report.warn(
                    "rails that are one",
                    format!("{spec} and {other} are one port or one address"),
                    "give each its own address, in a subnet of its own; a bond is one rail",
                ),
            }
        }
    }
    distinct.len()
}

/// Which ends the first and the second rail would have, and why. A peer's addresses may change that.
fn choices(report: &mut Report, settings: &Settings, facts: &[DeviceFacts]) -> Option<RailSpec> {
    let [wish1, wish2] = &settings.wishes.rails;
    let first = match choose(facts, Asker::Rail1, wish1, None, None) {
        Ok(first) => first,
        Err(error) => {
            let fix = format!("see the ports above, or {USE_TCP}");
            report.say(settings.rails.absent(), "first rail", error.to_string(), fix);
            return None;
        }
    };
    report.ok("first rail", first.to_string());
    let others = without(facts, &first.spec);
    let second = choose(&others, Asker::Rail2, wish2, None, None);
    match second {
        Ok(second) => report.ok("second rail", second.to_string()),
        // One port is all that many machines have.
        Err(_) if others.is_empty() && wish2.is_empty() => {
            report.ok("second rail", "none: there is no other port");
        }
        Err(error) => {
            let two_wanted = settings.wishes.dual == railset::pairing::DualRail::Two;
            let wanted = two_wanted || !wish2.is_empty();
            let status = if wanted { Status::Fail } else { Status::Warn };
            let fix = "see the ports above; METRALE_EXPERT_DUAL_RAIL=0 makes do with one rail";
            report.say(status, "second rail", error.to_string(), fix);
        }
    }
    Some(first.spec)
}

/// The devices without what is the same rail as `spec`.
fn without(facts: &[DeviceFacts], spec: &RailSpec) -> Vec<DeviceFacts> {
    let is_other = |device: &DeviceFacts, port: &PortFacts| {
        let same_port = device.name == spec.device && port.number == spec.port;
        let same_function =
            device.node_guid == spec.node_guid && device.node_guid != 0 && port.number == spec.port;
        !same_port && !same_function && !port.gids.iter().any(|gid| gid.gid == spec.gid)
    };
    let mut others = facts.to_vec();
    for device in &mut others {
        let mut ports = std::mem::take(&mut device.ports);
        ports.retain(|port| is_other(device, port));
        device.ports = ports;
    }
    others.retain(|device| !device.ports.is_empty());
    others
}

/// Whether the pages of a file can be published as they are, tried with the first rail's device.
fn file_pages(
    report: &mut Report,
    devices: &[Device],
    first: Option<&RailSpec>,
    store: Option<&Path>,
) {
    let is_first = |device: &&Device| first.is_some_and(|spec| spec.device == device.facts.name);
    let Some(device) = devices.iter().find(is_first).or(devices.first()) else { return };
    let (name, device_name) = ("file pages", &device.facts.name);
    let temp = std::env::temp_dir();
    let dir = store.filter(|dir| dir.is_dir()).unwrap_or(&temp);
    let probed =
        ProtectionDomain::new(&device.context).and_then(|domain| probe_file_pages(&domain, dir));
    match probed {
        Ok(FilePages::Registered) => report.ok(
            name,
            format!("{device_name} registers a file's pages for remote reading, without a copy"),
        ),
        Ok(FilePages::Refused(error)) => report.warn(
            name,
            format!(
                "{device_name} refuses a read-only mapping of a file ({error}): what a peer here \
                 publishes must be copied into pinned memory"
            ),
            "run Linux 6.2 or newer where a peer is to publish file pages as they are",
        ),
        Err(error) => {
            report.warn(name, error.to_string(), "see the locked memory below");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use railset::facts::{Gid, GidFacts, GidKind};
    use std::net::{IpAddr, Ipv4Addr};

    fn device(name: &str, node_guid: u64, last: u8) -> DeviceFacts {
        let gid = Gid::from_ip(IpAddr::V4(Ipv4Addr::new(10, 1, 0, last)));
        let gids = vec![GidFacts { index: 3, gid, kind: GidKind::RoceV2, netdev: None }];
        DeviceFacts {
            name: name.into(),
            node_guid,
            numa_node: None,
            interfaces: Vec::new(),
            ports: vec![PortFacts {
                number: 1,
                state: PortState::Active,
                link_layer: LinkLayer::Ethernet,
                lid: 0,
                active_mtu: Mtu::B4096,
                bits_per_s: Some(100_000_000_000),
                gids,
            }],
            initiator_depth: 16,
            responder_depth: 16,
            max_qp_wr: 1024,
            max_mr_size: 1 << 40,
        }
    }

    #[test]
    fn two_names_of_one_rail_are_counted_once_and_told() {
        for twin in [device("b", 1, 2), device("b", 2, 1)] {
            let mut report = Report::default();
            let found = [device("a", 1, 1), twin];
            assert_eq!(distinct_rails(&mut report, &found), 1);
            let told = serde_json::to_string(&report).unwrap();
            assert!(told.contains("rails that are one") && told.contains("bond"), "{told}");
            let spec = choose(&found, Asker::Rail1, &Wish::default(), None, None).unwrap().spec;
            assert!(without(&found, &spec).is_empty());
        }
        let mut report = Report::default();
        let found = [device("a", 1, 1), device("b", 2, 2)];
        assert_eq!(distinct_rails(&mut report, &found), 2);
        assert!(!serde_json::to_string(&report).unwrap().contains("name"));
    }

    #[test]
    fn a_kernels_list_that_cannot_be_read_is_not_taken_for_an_empty_one() {
        let sysfs = tempfile::tempdir().unwrap();
        assert!(in_kernel(&sysfs.path().join("infiniband")).unwrap().is_empty());
        for name in ["mlx5_1", "mlx5_0"] {
            std::fs::create_dir(sysfs.path().join(name)).unwrap();
        }
        assert_eq!(in_kernel(sysfs.path()).unwrap(), ["mlx5_0", "mlx5_1"]);
        let file = sysfs.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(in_kernel(&file).is_err());
    }

    #[test]
    fn a_port_that_carries_nothing_is_told_what_its_kind_needs() {
        let mut port = device("a", 1, 1).ports.remove(0);
        port.state = PortState::Down;
        assert!(state_fix(&port, "eth7").contains("ip link set eth7 up"));
        port.link_layer = LinkLayer::InfiniBand;
        assert!(state_fix(&port, "eth7").contains("cable"));
        port.state = PortState::Initialising;
        assert!(state_fix(&port, "eth7").contains("opensm"));
    }

    #[test]
    fn a_port_is_told_with_all_that_a_rail_depends_on() {
        let mut port = device("a", 1, 1).ports.remove(0);
        let told = describe_port(&port);
        assert_eq!(told, "active, Ethernet, 100.0 Gb/s, MTU 4096; GID 3 ::ffff:10.1.0.1 RoCEv2");
        port.gids = vec![port.gids[0].clone(); 9];
        port.bits_per_s = None;
        let told = describe_port(&port);
        assert!(told.contains("speed not told") && told.ends_with(" and 3 more"), "{told}");
    }
}
