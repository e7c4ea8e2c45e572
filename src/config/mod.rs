//! What the operator wrote. STUB.

mod settings;

pub use settings::{
    AdminSettings, HeaderStyle, LogSettings, RedisMode, RedisSettings, ServerSettings, Settings, StoreKind,
    StoreSettings,
};
