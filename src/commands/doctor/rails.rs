//! The rails that both ends agree on, and how fast each is alone.

use expert_peer::cli::one_line;
use expert_tier::verbs::{OpenError, VerbsOptions, VerbsTier};
use railset::choose::{RailSpec, Wish};
use railset::pairing::{DualRail, RailWishes};

use super::peer::{bandwidth, fetch_fix, measured, round_trip};
use super::report::{Report, bit_rate};
use super::{Settings, USE_TCP};
use crate::backend::BackendArgs;

/// A rail that moves less than its port's speed divided by this is worth a look: the rest is lost to
/// packet headers, or to a link that is not what it seems.
const EXPECTED_PART: f64 = 2.0;

/// Agrees with the peer on rails, then measures each alone. `both_have` is how many rails both ends
/// seem to have; where this machine has none, its own checks say why.
pub(super) fn check(
    report: &mut Report,
    args: &BackendArgs,
    options: &VerbsOptions,
    wished: &Settings,
    both_have: usize,
) {
    let name = "rails to the peer";
    if both_have == 0 {
        return;
    }
    let agreed = match VerbsTier::connect(options.clone()) {
        Ok(tier) => tier.rails(),
        Err(error) => {
            let fix = format!(
                "see the peer's log; where it only needs longer, raise --expert-connect-ms; or \
                 {USE_TCP}"
            );
            return report.say(wished.rails.absent(), name, error.to_string(), fix);
        }
    };
    let specs: Vec<_> = agreed.iter().map(ToString::to_string).collect();
    let found = specs.join(" | ");
    let one_is_wished = wished.wishes.dual == DualRail::One;
    if agreed.len() == 1 && both_have > 1 && !one_is_wished {
        let fix =
            "give each rail a subnet of its own, on both ends, so that each has its own route";
        report.warn(name, format!("{found} | {}", why_one(options)), fix);
    } else {
        report.ok(name, found);
    }
    agreed.iter().for_each(|spec| one_rail(report, args, options, spec));
}

/// Why there is no second rail, in the words of an attempt to have two.
fn why_one(options: &VerbsOptions) -> String {
    let mut options = options.clone();
    options.wishes.dual = DualRail::Two;
    match VerbsTier::connect(options) {
        Ok(_) => "two rails were there a moment later".into(),
        Err(error) => error.to_string(),
    }
}

fn one_rail(report: &mut Report, args: &BackendArgs, options: &VerbsOptions, spec: &RailSpec) {
    let (device, port) = (&spec.device, spec.port);
    let name = format!("rail {device}");
    let wish = Wish { device: Some(device.clone()), gid_index: Some(spec.gid_index) };
    let wishes = RailWishes { dual: DualRail::One, rails: [wish, Wish::default()] };
    let tier = VerbsTier::connect(VerbsOptions { wishes, ..options.clone() });
    let found = tier.map_err(anyhow::Error::from).and_then(|tier| measured(args, &tier));
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            let fix = match error.chain().any(|cause| cause.is::<OpenError>()) {
                true => format!(
                    "try `ib_read_bw -d {device} -i {port} -x {}` between the two machines; look \
                     for UDP port 4791 in firewalls, and at the peer's log",
                    spec.gid_index
                ),
                false => fetch_fix(&error).to_owned(),
            };
            return report.fail(name, one_line(&error), fix);
        }
    };
    report.ok(format!("{name} round trip"), round_trip(&found));
    let name = format!("{name} bandwidth");
    let Some(port_bits_per_s) = spec.bits_per_s else {
        return report.ok(name, bandwidth(&found, "; the port does not tell its speed"));
    };
    let port_bits_per_s = port_bits_per_s as f64;
    let beside = format!(" of the port's {}", bit_rate(port_bits_per_s));
    if found.bytes_per_s * 8.0 * EXPECTED_PART >= port_bits_per_s {
        return report.ok(name, bandwidth(&found, &beside));
    }
    let fix = format!(
        "compare with `ib_read_bw -d {device} -i {port} -x {}`; where that is slow too, look at the \
         adapter's PCIe link (lspci -vv, LnkSta), at the MTU of both ends and at the cable; where it \
         is fast, at --expert-queue-pairs, --expert-check-threads and the size of the records",
        spec.gid_index
    );
    report.warn(name, bandwidth(&found, &(beside + ", less than half")), fix);
}
