//! All GIDs of a host, judged for one rail.

use std::collections::BTreeSet;

use super::error::ChooseError;
use super::explain::{Choice, Explanation, PassedOver, Reason, Routed, listed};
use super::spec::{RailSpec, Target};
use super::wish::{Asker, Wish};
use crate::facts::{DeviceFacts, Family, Gid, GidFacts, GidKind, LinkLayer, PortFacts, PortState};
use crate::route::KernelRoute;

/// A usable GID and its place among the others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Candidate {
    pub(crate) rank: Rank,
    pub(crate) spec: RailSpec,
}

/// Smaller is better; the fields in the order in which they count.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Rank {
    pub(crate) routed: Routed,
    pub(crate) is_ipv4_link_local: bool,
    pub(crate) is_ipv6: bool,
    place: (usize, u8, u8),
}

/// All GIDs of a host, judged for one rail.
pub(crate) struct Survey {
    /// Best first.
    pub(crate) usable: Vec<Candidate>,
    pub(crate) passed: Vec<PassedOver>,
}

impl Survey {
    pub(crate) fn of(
        devices: &[DeviceFacts],
        wish: &Wish,
        target: Option<&Target>,
        route: Option<&KernelRoute>,
    ) -> Self {
        let (route, interface) = (Route::of(devices, target, route), wish.interface(devices));
        let mut survey = Self { usable: Vec::new(), passed: Vec::new() };
        for (position, device) in devices.iter().enumerate() {
            if !wish.is_for(device, devices) {
                survey.pass(device, None, None, Reason::OtherDeviceWished);
                continue;
            }
            for port in &device.ports {
                if port.state != PortState::Active {
                    survey.pass(device, Some(port), None, Reason::Port(port.state));
                    continue;
                }
                if port.gids.is_empty() {
                    survey.pass(device, Some(port), None, Reason::NoGid);
                }
                for gid in &port.gids {
                    // A row without an interface belongs to its device's.
                    let netdev = gid.netdev.as_deref().filter(|_| interface.is_some());
                    let other = netdev.is_some() && netdev != interface;
                    let other = other.then_some(Reason::OtherInterfaceWished);
                    match other.or_else(|| judge(port, gid, wish, target)) {
                        Some(reason) => survey.pass(device, Some(port), Some(gid), reason),
                        None => survey.usable.push(Candidate {
                            rank: Rank {
                                routed: route.relation(port, gid),
                                is_ipv4_link_local: gid.gid.is_ipv4_link_local(),
                                is_ipv6: gid.gid.family() == Family::Ipv6,
                                place: (position, port.number, gid.index),
                            },
                            spec: spec(device, port, gid),
                        }),
                    }
                }
            }
        }
        survey.usable.sort_by_key(|candidate| candidate.rank);
        survey
    }

    fn pass(
        &mut self,
        device: &DeviceFacts,
        port: Option<&PortFacts>,
        gid: Option<&GidFacts>,
        reason: Reason,
    ) {
        self.passed.push(PassedOver {
            device: device.name.clone(),
            port: port.map(|port| port.number),
            gid: gid.map(|gid| (gid.index, gid.gid)),
            reason,
        });
    }

    /// `chosen` and why; the other usable ones were passed over too.
    pub(crate) fn choice(&self, chosen: &Candidate, wish: &Wish) -> Choice {
        let others = self.usable.iter().filter(|candidate| *candidate != chosen);
        let outranked = others.map(|Candidate { spec, .. }| PassedOver {
            device: spec.device.clone(),
            port: Some(spec.port),
            gid: Some((spec.gid_index, spec.gid)),
            reason: Reason::Outranked,
        });
        let mut passed = self.passed.clone();
        passed.extend(outranked);
        passed.sort_by(|a, b| (&a.device, a.port, a.gid).cmp(&(&b.device, b.port, b.gid)));
        let explanation = Explanation { routed: chosen.rank.routed, wish: wish.clone(), passed };
        Choice { spec: chosen.spec.clone(), explanation }
    }

    /// Why nothing is usable.
    pub(crate) fn error(&self, devices: &[DeviceFacts], asker: Asker, wish: &Wish) -> ChooseError {
        let (knob, gid_knob) = (asker.device_knob(), asker.gid_knob());
        if devices.is_empty() {
            return ChooseError::NoDevice;
        }
        let with = |keep: fn(&Reason) -> bool| -> Vec<&PassedOver> {
            self.passed.iter().filter(|passed| keep(&passed.reason)).collect()
        };
        let judged: Vec<_> = self.passed.iter().filter(|p| p.gid.is_some()).collect();
        let ports = listed(&with(|reason| matches!(reason, Reason::Port(_))));
        if let Some(wished) = wish.device.clone() {
            if !devices.iter().any(|device| wish.is_for(device, devices)) {
                let names: Vec<_> = devices.iter().map(names).collect();
                return ChooseError::WishedDeviceMissing { wished, knob, there: listed(&names) };
            }
            if judged.is_empty() && with(|reason| *reason == Reason::NoGid).is_empty() {
                return ChooseError::WishedDeviceDown { wished, knob, ports };
            }
        }
        if judged.is_empty() && with(|reason| *reason == Reason::NoGid).is_empty() {
            return ChooseError::NoActivePort { ports };
        }
        if let Some(wished) = wish.gid_index {
            let there = listed(&all_gids(devices, wish));
            let found = judged.iter().filter(|p| p.gid.is_some_and(|(index, _)| index == wished));
            let reasons: Vec<_> = found.collect();
            if reasons.is_empty() {
                return ChooseError::WishedGidMissing { wished, knob: gid_knob, there };
            }
            let reasons = listed(&reasons);
            return ChooseError::WishedGidUnusable { wished, knob: gid_knob, reasons, there };
        }
        let unfit = with(|reason| {
            !matches!(
                reason,
                Reason::Port(_) | Reason::OtherDeviceWished | Reason::OtherInterfaceWished
            )
        });
        let there = listed(&unfit);
        if unfit.iter().all(|passed| passed.reason == Reason::LinkLocal) {
            return ChooseError::OnlyLinkLocal { there };
        }
        ChooseError::NoRoutableGid { there, device_knob: knob, gid_knob }
    }
}

/// What the kernel's route says of the GIDs.
struct Route<'a> {
    /// Where it leads, if that is known.
    peer: Option<Gid>,
    route: Option<&'a KernelRoute>,
    /// The interface that the route uses, or else that of the first GID with the source address;
    /// `None` where neither is known.
    netdev: Option<&'a str>,
    is_rdma: bool,
}

impl<'a> Route<'a> {
    fn of(
        devices: &'a [DeviceFacts],
        target: Option<&Target>,
        route: Option<&'a KernelRoute>,
    ) -> Self {
        let ports = || devices.iter().flat_map(|device| &device.ports);
        let gids = || ports().flat_map(|port| &port.gids);
        let source = route.map(|route| route.source);
        let found = gids().find(|gid| source == Some(gid.gid.ip()));
        let interface = route.and_then(|route| route.interface.as_deref());
        let netdev = interface.or_else(|| found.and_then(|gid| gid.netdev.as_deref()));
        let peer = target.map(|target| target.gid);
        let is_on_route = |gid: &GidFacts| netdev.is_some() && gid.netdev.as_deref() == netdev;
        let is_rdma = found.is_some() || gids().any(is_on_route);
        Self { peer, route, netdev, is_rdma }
    }

    fn relation(&self, port: &PortFacts, gid: &GidFacts) -> Routed {
        if port.gids.iter().any(|own| self.peer == Some(own.gid)) {
            return Routed::PeersOwn;
        }
        let Some(route) = self.route else { return Routed::Unknown };
        // A row without an interface is held against its address alone.
        let is_source = gid.gid.ip() == route.source;
        let is_elsewhere = gid.netdev.is_some()
            && route.interface.is_some()
            && gid.netdev.as_deref() != route.interface.as_deref();
        if is_source && !is_elsewhere {
            return Routed::Source;
        }
        if self.netdev.is_some() && self.netdev == gid.netdev.as_deref() {
            return Routed::Netdev;
        }
        match (is_source, self.is_rdma) {
            (true, _) => Routed::SourceElsewhere,
            (false, true) => Routed::OtherPort,
            (false, false) => Routed::Elsewhere,
        }
    }
}

/// What stands against a row of an active port's table.
fn judge(port: &PortFacts, row: &GidFacts, wish: &Wish, target: Option<&Target>) -> Option<Reason> {
    if wish.gid_index.is_some_and(|wished| wished != row.index) {
        return Some(Reason::OtherGidWished);
    }
    if port.link_layer == LinkLayer::Ethernet && row.kind != GidKind::RoceV2 {
        return Some(Reason::NotRoceV2(row.kind));
    }
    let own = Target { link_layer: port.link_layer, gid: row.gid, lid: port.lid };
    own.fault().or_else(|| target.and_then(|target| own.obstacle(target)))
}

fn spec(device: &DeviceFacts, port: &PortFacts, gid: &GidFacts) -> RailSpec {
    RailSpec {
        device: device.name.clone(),
        node_guid: device.node_guid,
        numa_node: device.numa_node,
        port: port.number,
        link_layer: port.link_layer,
        gid_index: gid.index,
        gid: gid.gid,
        lid: port.lid,
        mtu: port.active_mtu,
        netdev: gid.netdev.clone(),
        bits_per_s: port.bits_per_s,
        initiator_depth: device.initiator_depth,
        responder_depth: device.responder_depth,
    }
}

/// A device's name, and those of its interfaces in brackets.
fn names(device: &DeviceFacts) -> String {
    let rows = device.ports.iter().flat_map(|port| &port.gids);
    let netdevs = rows.filter_map(|row| row.netdev.as_ref()).chain(&device.interfaces);
    let interfaces: BTreeSet<&str> = netdevs.map(String::as_str).collect();
    match interfaces.is_empty() {
        true => device.name.clone(),
        false => format!("{} ({})", device.name, Vec::from_iter(interfaces).join(", ")),
    }
}

/// Every GID of the wished device, or of all.
fn all_gids(devices: &[DeviceFacts], wish: &Wish) -> Vec<String> {
    let mut all = Vec::new();
    for device in devices {
        if !wish.is_for(device, devices) {
            continue;
        }
        for port in &device.ports {
            all.extend(port.gids.iter().map(|GidFacts { index, gid, kind, .. }| {
                format!("{} port {} GID {index} {gid} {kind}", device.name, port.number)
            }));
        }
    }
    all
}
