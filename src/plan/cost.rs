//! What a request costs: what is reserved before it passes, and what it is settled at behind its answer.

use std::num::NonZeroU64;

use actix_web::http::header::{HeaderMap, HeaderName};
use actix_web::http::{Method, StatusCode};

use crate::limit::algorithm::AMOUNT_MAX;

/// The cost of requests on one route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cost {
    /// Units that a request takes, unless its method says otherwise.
    pub any: NonZeroU64,
    /// Units that a request of these methods takes. `HEAD` takes what `GET` does.
    pub by_method: Vec<(Method, NonZeroU64)>,
    /// The field of the backend's answer that says what the request did cost.
    pub from: Option<HeaderName>,
    /// Answers that cost nothing.
    pub free: FreeAnswers,
}

/// Answers whose requests get back what they took.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FreeAnswers {
    /// All server errors: of the backend, and of the gateway in its place.
    pub server_errors: bool,
    /// These status codes.
    pub statuses: Vec<u16>,
}

/// What an answer says about the cost of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// What was reserved.
    AsReserved,
    /// So many units.
    At(u64),
    /// The backend named a cost that is no whole number; what was reserved stays charged.
    Unclear,
}

impl Cost {
    /// Each request takes `units`, and that is it.
    #[must_use]
    pub fn fixed(units: NonZeroU64) -> Self {
        Self { any: units, by_method: Vec::new(), from: None, free: FreeAnswers::default() }
    }

    /// Units that a request of this method takes.
    #[must_use]
    pub fn of(&self, method: &Method) -> NonZeroU64 {
        let method = if method == Method::HEAD { &Method::GET } else { method };
        self.by_method.iter().find(|(other, _)| other == method).map_or(self.any, |(_, cost)| *cost)
    }

    /// The largest cost that a request may have.
    #[must_use]
    pub fn largest(&self) -> NonZeroU64 {
        self.by_method.iter().map(|(_, cost)| *cost).fold(self.any, NonZeroU64::max)
    }

    /// What an answer of this status and with these fields says. The field that names the cost is taken out: it is for the
    /// gateway, not for its client.
    pub fn settled(&self, status: StatusCode, fields: &mut HeaderMap) -> Settled {
        let named = self.from.as_ref().and_then(|name| fields.remove(name).last());
        if self.free.server_errors && status.is_server_error()
            || self.free.statuses.contains(&status.as_u16())
        {
            return Settled::At(0);
        }
        let Some(named) = named else { return Settled::AsReserved };
        let digits = named.as_bytes().iter().all(u8::is_ascii_digit);
        let units = named.to_str().ok().filter(|_| digits).and_then(|text| text.parse().ok());
        units.filter(|units| *units <= AMOUNT_MAX).map_or(Settled::Unclear, Settled::At)
    }
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::HeaderValue;

    use super::*;

    fn n(value: u64) -> NonZeroU64 {
        NonZeroU64::new(value).unwrap()
    }

    #[test]
    fn a_method_may_cost_more() {
        let cost = Cost { by_method: vec![(Method::POST, n(10)), (Method::GET, n(2))], ..Cost::fixed(n(3)) };
        assert_eq!(cost.of(&Method::POST), n(10));
        assert_eq!(cost.of(&Method::HEAD), n(2));
        assert_eq!(cost.of(&Method::PUT), n(3));
        assert_eq!(cost.largest(), n(10));
    }

    #[test]
    fn the_answer_names_the_cost() {
        let cost = Cost { from: Some(HeaderName::from_static("x-cost")), ..Cost::fixed(n(3)) };
        let settled = |value: Option<&'static str>| {
            let mut fields = HeaderMap::new();
            if let Some(value) = value {
                fields.insert(HeaderName::from_static("x-cost"), HeaderValue::from_static(value));
            }
            let settled = cost.settled(StatusCode::OK, &mut fields);
            assert!(fields.is_empty(), "the client does not see the field");
            settled
        };
        assert_eq!(settled(None), Settled::AsReserved);
        assert_eq!([Some("0"), Some("17")].map(settled), [Settled::At(0), Settled::At(17)]);
        for unclear in ["-1", "1.5", "", "+3", "1e3", "99999999999999999999", "1000000000000000"] {
            assert_eq!(settled(Some(unclear)), Settled::Unclear, "{unclear}");
        }
    }

    #[test]
    fn some_answers_cost_nothing() {
        let free = FreeAnswers { server_errors: true, statuses: vec![404] };
        let cost = Cost { free, from: Some(HeaderName::from_static("x-cost")), ..Cost::fixed(n(3)) };
        let settled =
            |status: u16| cost.settled(StatusCode::from_u16(status).unwrap(), &mut HeaderMap::new());
        assert_eq!(
            [200, 400, 404, 500, 599].map(settled),
            [Settled::AsReserved, Settled::AsReserved, Settled::At(0), Settled::At(0), Settled::At(0),]
        );
    }
}
