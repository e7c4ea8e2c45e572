//! The kinds of failures that are told apart: a fixed list, since they are labels of a metric. Nothing that a server says ever
//! becomes a label.

use super::StoreError;

/// Declares the kinds with their names.
macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $kind:ident $name:literal,)+) => {
        /// In what way a store failed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(in crate::limit) enum FailureKind {
            $($(#[doc = $doc])+ $kind,)+
        }

        impl FailureKind {
            /// All of them.
            pub(in crate::limit) const ALL: &[Self] = &[$(Self::$kind,)+];

            /// Its name, as the label of a metric has it.
            #[must_use]
            pub(in crate::limit) fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)+
                }
            }
        }
    };
}

kinds! {
    /// No answer in time.
    Timeout "timeout",
    /// Too much was waiting already.
    Saturated "saturated",
    /// There was no connection.
    Disconnected "disconnected",
    /// The connection broke while it was asked.
    Lost "lost",
    /// No connection could be opened: nobody listens there.
    Refused "refused",
    /// No connection could be opened: no such host, no way there.
    Unreachable "unreachable",
    /// No connection could be opened: the two sides do not accept each other's certificates.
    Tls "tls",
    /// No connection could be opened: a file with a password, a URL or a certificate cannot be used.
    File "file",
    /// The Sentinels know of no primary by this name, or none that is one.
    NoPrimary "no_primary",
    /// What is kept of a caller cannot be read.
    Unreadable "unreadable",
    /// The clocks are more than a period of a quota apart.
    ClocksApart "clocks_apart",
    /// It had failed too often: nobody asked it, or waited for it any longer.
    Tripped "tripped",
    /// An answer that is none.
    Nonsense "nonsense",
    /// `READONLY`: it is a replica.
    ReadOnly "readonly",
    /// `LOADING`: it is reading its data.
    Loading "loading",
    /// `OOM`: its memory is full.
    Oom "oom",
    /// `BUSY`: another script does not end.
    Busy "busy",
    /// `NOPERM`: the user may not do that.
    NoPerm "noperm",
    /// `NOAUTH`: a password is needed.
    NoAuth "noauth",
    /// `WRONGPASS`: the password is wrong, or the user.
    WrongPass "wrongpass",
    /// `MISCONF`: it cannot write to its disk.
    Misconf "misconf",
    /// `NOREPLICAS`: too few replicas are in step.
    NoReplicas "noreplicas",
    /// `CLUSTERDOWN`: the cluster does not cover this hash slot, or has no majority.
    ClusterDown "clusterdown",
    /// `MASTERDOWN`: a replica has lost its primary.
    MasterDown "masterdown",
    /// `MOVED`, `ASK`, `TRYAGAIN`: the hash slot is on its way.
    Moved "moved",
    /// It has as many connections as it takes.
    MaxClients "maxclients",
    /// Anything else.
    Other "other",
}

impl FailureKind {
    /// The kind of an error by the code that a Redis begins it with.
    #[must_use]
    pub(in crate::limit) fn of_code(code: &str) -> Self {
        match code {
            "READONLY" => Self::ReadOnly,
            "LOADING" => Self::Loading,
            "OOM" => Self::Oom,
            "BUSY" => Self::Busy,
            "NOPERM" => Self::NoPerm,
            "NOAUTH" => Self::NoAuth,
            "WRONGPASS" => Self::WrongPass,
            "MISCONF" => Self::Misconf,
            "NOREPLICAS" => Self::NoReplicas,
            "CLUSTERDOWN" => Self::ClusterDown,
            "MASTERDOWN" => Self::MasterDown,
            "MOVED" | "ASK" | "TRYAGAIN" => Self::Moved,
            "WRONGTYPE" => Self::Unreadable,
            _ => Self::Other,
        }
    }

    /// Its place in [`ALL`](Self::ALL).
    pub(in crate::limit) fn place(self) -> usize {
        self as usize
    }
}

impl StoreError {
    /// In what way the store failed.
    #[must_use]
    pub(in crate::limit) fn kind(&self) -> FailureKind {
        match self {
            Self::Timeout => FailureKind::Timeout,
            Self::Saturated => FailureKind::Saturated,
            Self::Disconnected => FailureKind::Disconnected,
            Self::Lost => FailureKind::Lost,
            Self::Tripped | Self::GivenUp => FailureKind::Tripped,
            Self::ClocksApart => FailureKind::ClocksApart,
            Self::Unreadable(_) => FailureKind::Unreadable,
            Self::Nonsense(_) => FailureKind::Nonsense,
            Self::Refused(code) => FailureKind::of_code(code),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_place_and_a_name_of_its_own() {
        for (place, kind) in FailureKind::ALL.iter().enumerate() {
            assert_eq!(kind.place(), place);
            let others = FailureKind::ALL.iter().filter(|other| other.name() == kind.name());
            assert_eq!(others.count(), 1, "{kind:?}");
        }
    }

    /// Labels come from a fixed list: whatever a server says, it makes no new series.
    #[test]
    fn an_unknown_code_makes_no_new_kind() {
        for code in ["", "CANARY", "readonly", "READONLY\n", "ERR"] {
            assert_eq!(FailureKind::of_code(code), FailureKind::Other, "{code:?}");
        }
        assert_eq!(StoreError::Refused("OOM".to_owned()).kind(), FailureKind::Oom);
    }
}
