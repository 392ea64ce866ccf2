//! `--fallback`: a backend with others behind it.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use expert_peer::cli::{UsageError, store_error};
use expert_tier::fallback::{FallbackOptions, FallbackTier, NotOpened, WayPlan};
use expert_tier::fingerprint::Fingerprint;
use expert_tier::posix::PosixTier;
use expert_tier::store::StoreError;
use expert_tier::tcp::{DialError, Dialler, TcpOptions, TcpTier};
use expert_tier::tier::{ExpertTier, TierKind};
use expert_tier::uma::UmaTier;
#[cfg(metrale_rdma_verbs)]
use expert_tier::verbs::{OpenError, VerbsOptions, VerbsTier};
use gpu_sys::env;
#[cfg(metrale_rdma_verbs)]
use gpu_sys::verbs::VerbsError;

use super::{BackendArgs, dialler, setting};

/// The value of `--expert-fallback`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FallbackList(Vec<TierKind>);

impl FromStr for FallbackList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut list = Vec::new();
        for name in text.split(',') {
            let kind = match name.trim() {
                "tcp" => TierKind::Rdma,
                "posix" => TierKind::Posix,
                "uma" => TierKind::Uma,
                other => {
                    let other: String = other.chars().take(32).collect();
                    return Err(format!("{other:?} is no other way; there are tcp, posix and uma"));
                }
            };
            if list.contains(&kind) {
                return Err(format!("{} is there twice", name.trim()));
            }
            list.push(kind);
        }
        Ok(Self(list))
    }
}

impl BackendArgs {
    /// The other ways asked for, none of which is `first`.
    pub(super) fn fallback(&self, first: TierKind) -> anyhow::Result<Vec<TierKind>> {
        let variable = &env::EXPERT_FALLBACK;
        let Some(FallbackList(others)) = setting(self.fallback.clone(), variable)? else {
            return Ok(Vec::new());
        };
        let (flag, name) = (variable.flag(), variable.name);
        if others.contains(&first) {
            let text = format!("--{flag} ({name}) names the backend itself, {first}: leave it out");
            return Err(UsageError(text).into());
        }
        let local = others.iter().find(|kind| matches!(kind, TierKind::Posix | TierKind::Uma));
        let store = setting(self.store.clone(), &env::EXPERT_STORE)?;
        if let (Some(kind), None) = (local, store) {
            let store = &env::EXPERT_STORE;
            let text = format!(
                "--{flag} ({name}) names {kind}, which needs a copy of the peer's store: give --{} \
                 or set {}",
                store.flag(),
                store.name
            );
            return Err(UsageError(text).into());
        }
        Ok(others)
    }

    pub(super) fn open_with(
        &self,
        first: TierKind,
        others: &[TierKind],
    ) -> anyhow::Result<(Box<dyn ExpertTier>, Option<Dialler>)> {
        let kinds = std::iter::once(first).chain(others.iter().copied());
        let plans = kinds.map(|kind| self.plan(kind)).collect::<anyhow::Result<Vec<_>>>()?;
        let dialler = match first {
            TierKind::Rdma | TierKind::RdmaVerbs => Some(dialler(&self.tcp()?)),
            TierKind::Posix | TierKind::Uma => None,
        };
        let fingerprint = setting(self.fingerprint, &env::EXPERT_FINGERPRINT)?;
        let options = FallbackOptions { fingerprint, ..FallbackOptions::default() };
        Ok((Box::new(FallbackTier::open(plans, options)?), dialler))
    }

    fn plan(&self, kind: TierKind) -> anyhow::Result<WayPlan> {
        Ok(match kind {
            TierKind::Posix => {
                let options = self.posix()?;
                let bounds = (options.deadline, options.total);
                local(kind, self.store(kind)?, bounds, move |store| {
                    PosixTier::open(store, options.clone())
                })
            }
            TierKind::Uma => {
                let options = self.uma()?;
                let bounds = (options.deadline, options.total);
                local(kind, self.store(kind)?, bounds, move |store| UmaTier::open(store, &options))
            }
            TierKind::Rdma => over_tcp(self.tcp()?),
            #[cfg(metrale_rdma_verbs)]
            TierKind::RdmaVerbs => over_verbs(self.verbs()?),
            #[cfg(not(metrale_rdma_verbs))]
            TierKind::RdmaVerbs => return Err(super::UnknownBackend::NoVerbs.into()),
        })
    }
}

fn local<T: ExpertTier + 'static>(
    kind: TierKind,
    store: PathBuf,
    (deadline, total): (Duration, Duration),
    open: impl Fn(&std::path::Path) -> Result<T, StoreError> + Send + Sync + 'static,
) -> WayPlan {
    let open = move |_| match open(&store) {
        Ok(tier) => Ok(Arc::new(tier) as Arc<dyn ExpertTier>),
        Err(error) => Err(NotOpened::Refused(store_error(&store, error).into())),
    };
    WayPlan { kind, deadline, bound: deadline.saturating_add(total), open: Box::new(open) }
}

fn over_tcp(options: TcpOptions) -> WayPlan {
    let (kind, deadline) = (TierKind::Rdma, options.deadline);
    let bound = deadline.saturating_add(options.total);
    let open = move |wanted: Option<Fingerprint>| {
        let fingerprint = wanted.or(options.fingerprint);
        match TcpTier::connect(TcpOptions { fingerprint, ..options.clone() }) {
            Ok(tier) => Ok(Arc::new(tier) as Arc<dyn ExpertTier>),
            Err(error) => Err(not_dialled(error)),
        }
    };
    WayPlan { kind, deadline, bound, open: Box::new(open) }
}

#[cfg(metrale_rdma_verbs)]
fn over_verbs(options: VerbsOptions) -> WayPlan {
    let (kind, deadline) = (TierKind::RdmaVerbs, options.deadline);
    let bound = deadline.saturating_add(options.total);
    let open = move |wanted: Option<Fingerprint>| {
        let fingerprint = wanted.or(options.fingerprint);
        match VerbsTier::connect(VerbsOptions { fingerprint, ..options.clone() }) {
            Ok(tier) => Ok(Arc::new(tier) as Arc<dyn ExpertTier>),
            Err(error) => Err(no_rails(error)),
        }
    };
    WayPlan { kind, deadline, bound, open: Box::new(open) }
}

/// A cable may be plugged in, an interface get its address, a device its driver; a library is not
/// installed under a process that runs.
#[cfg(metrale_rdma_verbs)]
fn no_rails(error: OpenError) -> NotOpened {
    match error {
        OpenError::Dial(error) => not_dialled(error),
        OpenError::Verbs(VerbsError::NoLibrary { .. } | VerbsError::MissingSymbol { .. }) => {
            NotOpened::Never(error.into())
        }
        error => NotOpened::Later(error.into()),
    }
}

/// A peer that is not there may come; one that refuses is as wrong as without other ways.
fn not_dialled(error: DialError) -> NotOpened {
    match error {
        DialError::Resolve { .. } | DialError::Connect { .. } | DialError::Io { .. } => {
            NotOpened::Later(error.into())
        }
        error if error.is_busy() => NotOpened::Later(error.into()),
        error => NotOpened::Refused(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(metrale_rdma_verbs)]
    #[test]
    fn only_a_library_that_is_not_there_is_given_up() {
        use railset::choose::ChooseError;
        let ports = || "rxe0 port 1: the port is down".to_owned();
        for later in [ChooseError::NoDevice, ChooseError::NoActivePort { ports: ports() }] {
            assert!(matches!(no_rails(later.into()), NotOpened::Later(_)));
        }
        let (library, reason) = ("libibverbs.so.1", "not found".into());
        let never = no_rails(VerbsError::NoLibrary { library, reason }.into());
        assert!(matches!(never, NotOpened::Never(_)), "{never}");
    }

    #[test]
    fn a_list_keeps_its_order_and_says_what_is_wrong_with_it() {
        let list: FallbackList = "uma, tcp".parse().unwrap();
        assert_eq!(list.0, [TierKind::Uma, TierKind::Rdma]);
        for (text, why) in [
            ("rdma", "\"rdma\""),
            ("tcp,", "\"\""),
            ("tcp,tcp", "tcp is there twice"),
            ("rdma-verbs", "tcp, posix and uma"),
        ] {
            let error = text.parse::<FallbackList>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
