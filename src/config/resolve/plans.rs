//! The tier table: plans and their limits.

use super::Context;
use crate::clock::micros;
use crate::config::mistakes::{Fault, Place};
use crate::config::raw::{
    AlgorithmWord, Enforce, LimitSection, PlanRouteSection, PlanSection, Raw, RouteSection,
};
use crate::limit::algorithm::{Algorithm, Concurrency, Quota, SlidingWindow, TokenBucket, Unusable};
use crate::limit::{Calendar, Rule, Scope};
use crate::plan::{Plan, Priority};

pub(super) fn resolve(raw: &Raw, context: &Context<'_>) -> Vec<Plan> {
    raw.plans.iter().map(|section| plan(section, raw, context)).collect()
}

fn plan(section: &PlanSection, raw: &Raw, context: &Context<'_>) -> Plan {
    for route in &section.routes {
        check_route(route, &section.name, raw, context);
    }
    let enforce = section.enforce.as_ref().map_or(Enforce::On, |written| written.value);
    let routes = section.routes.iter().map(|table| {
        let route = table.route.value.as_str();
        let scope = Scope::Route(route.into());
        let limits = rules(&table.limits, &scope, enforce, context).into_iter();
        (route.into(), limits.chain(candidates(&table.candidate, &scope, context)).collect())
    });
    let limits = rules(&section.limits, &Scope::Plan, enforce, context).into_iter();
    let per_key = rules(&section.per_key, &Scope::Key, enforce, context);
    let candidates = candidates(&section.candidate, &Scope::Plan, context);
    Plan {
        name: section.name.as_str().into(),
        limits: limits.chain(per_key).chain(candidates).collect(),
        routes: routes.collect(),
        on_failure: section.on_failure.as_ref().map(|written| written.value),
        priority: section.priority.as_ref().map_or(Priority::Normal, |written| written.value),
    }
}

/// Limits of a route that does not exist, or that leaves the plan out, would never count.
fn check_route(table: &PlanRouteSection, plan: &str, raw: &Raw, context: &Context<'_>) {
    let names: Vec<&str> = raw.routes.iter().map(|route| route.name.as_str()).collect();
    if !context.exists("route", &table.route, &names) {
        return;
    }
    let name = &table.route.value;
    if raw.routes.iter().any(|route| route.name == *name && !includes(route, plan)) {
        let fault = Fault::new(format!("limits a route that routes.{name}.plans does not give to the plan"));
        context.note(fault, &table.route);
    }
}

/// Clients know a limit by its name alone, so no two that apply to one request may share it.
pub(super) fn check_names(raw: &Raw, context: &Context<'_>) {
    for plan in &raw.plans {
        let of_accounts: Vec<&str> = plan.limits.iter().filter_map(name_of).collect();
        check_apart(&plan.per_key, &of_accounts, "the plan", context);
        let on_all_routes: Vec<&str> = plan.limits.iter().chain(&plan.per_key).filter_map(name_of).collect();
        let candidates: Vec<&str> = plan.candidate.iter().filter_map(name_of).collect();
        for route in &plan.routes {
            check_apart(&route.limits, &on_all_routes, "the plan", context);
            check_apart(&route.candidate, &candidates, "the plan", context);
        }
        for route in raw.routes.iter().filter(|route| includes(route, &plan.name)) {
            let on_this_route = plan.routes.iter().filter(|table| table.route.value == route.name);
            let on_this_route = on_this_route.flat_map(|table| &table.limits).filter_map(name_of);
            let of_plan: Vec<&str> = on_all_routes.iter().copied().chain(on_this_route).collect();
            check_apart(&route.limits, &of_plan, &format!("plan \"{}\"", plan.name), context);
        }
    }
}

/// Whether a route is given to the plan of this name.
pub(super) fn includes(route: &RouteSection, plan: &str) -> bool {
    route.plans.as_ref().is_none_or(|plans| plans.value.iter().any(|included| included.value == plan))
}

fn check_apart(limits: &[LimitSection], others: &[&str], whose: &str, context: &Context<'_>) {
    for name in limits.iter().filter_map(|limit| limit.name.as_ref()) {
        if others.contains(&name.value.as_str()) {
            let fault = Fault::new(format!("a limit of {whose} is named \"{}\" too", name.value));
            context.note(fault.hint("clients could not tell the two apart"), name);
        }
    }
}

fn name_of(limit: &LimitSection) -> Option<&str> {
    limit.name.as_ref().map(|name| name.value.as_str())
}

/// Limits that are only tried out.
fn candidates(sections: &[LimitSection], scope: &Scope, context: &Context<'_>) -> Vec<Rule> {
    for enforce in sections.iter().filter_map(|section| section.enforce.as_ref()) {
        context.note(Fault::new("a candidate is never enforced").hint("remove the key"), enforce);
    }
    rules(sections, scope, Enforce::On, context).into_iter().map(Rule::as_candidate).collect()
}

/// The limits that are there; what says nothing of its own is enforced as its plan is.
pub(super) fn rules(
    sections: &[LimitSection],
    scope: &Scope,
    plan: Enforce,
    context: &Context<'_>,
) -> Vec<Rule> {
    let mut names: Vec<&str> = Vec::new();
    for name in sections.iter().filter_map(|section| section.name.as_ref()) {
        if names.contains(&name.value.as_str()) {
            let fault = Fault::new(format!("there are two limits named \"{}\" here", name.value));
            context.note(fault, name);
        }
        names.push(&name.value);
    }
    let rules = sections.iter().filter_map(|section| {
        let rule = rule(section, scope, context)?;
        match section.enforce.as_ref().map_or(plan, |written| written.value) {
            Enforce::On => Some(rule),
            Enforce::Percent(percent) => Some(rule.for_percent(percent)),
            Enforce::Shadow => Some(rule.in_shadow()),
            Enforce::Off => None,
        }
    });
    rules.collect()
}

fn rule(section: &LimitSection, scope: &Scope, context: &Context<'_>) -> Option<Rule> {
    let word = section.algorithm.as_ref()?.value;
    if let Some(burst) = section.burst.as_ref().filter(|_| word != AlgorithmWord::TokenBucket) {
        let fault = Fault::new("only a token bucket has a burst").hint("add algorithm = \"token_bucket\"");
        context.note(fault, burst);
    }
    let (name, limit) = (section.name.as_ref()?, section.limit.as_ref()?);
    let rule = |algorithm| Rule::new(&name.value, scope.clone(), algorithm);
    let per = || section.per.as_ref().map(|per| micros(per.value));
    let made = match word {
        AlgorithmWord::SlidingWindow => {
            SlidingWindow::new(limit.value, per()?).map(Algorithm::SlidingWindow).map(rule)
        }
        AlgorithmWord::TokenBucket => {
            let burst = section.burst.as_ref().map_or(limit.value, |burst| burst.value);
            TokenBucket::new(limit.value, per()?, burst).map(Algorithm::TokenBucket).map(rule)
        }
        AlgorithmWord::Concurrency => Concurrency::new(limit.value).map(Algorithm::Concurrency).map(rule),
        AlgorithmWord::Quota => {
            let calendar = calendar(section, context)?;
            Quota::new(limit.value).map(|quota| Rule::quota(&name.value, scope.clone(), quota, calendar))
        }
    };
    let fault = |unusable: Unusable| {
        context.notes.add(Fault::new(unusable.to_string()).at(place_of(unusable, section)));
    };
    made.map_err(fault).ok()
}

fn calendar(section: &LimitSection, context: &Context<'_>) -> Option<Calendar> {
    let unit = section.unit.as_ref()?.value;
    let zone = section.zone.as_ref().map_or("UTC", |zone| &zone.value);
    let calendar = Calendar::new(unit, zone);
    calendar.map_err(|error| context.notes.add(Fault::new(error.to_string()).at(zone_place(section)))).ok()
}

fn zone_place(section: &LimitSection) -> &Place {
    section.zone.as_ref().map_or(&section.place, |zone| &zone.place)
}

/// The key that is to blame.
fn place_of(unusable: Unusable, section: &LimitSection) -> &Place {
    let amounts = [&section.limit, &section.burst].into_iter().flatten();
    let place = match unusable {
        Unusable::Per => section.per.as_ref().map(|per| &per.place),
        Unusable::Amount | Unusable::Window => {
            amounts.max_by_key(|amount| amount.value).map(|amount| &amount.place)
        }
        Unusable::Precision => None,
    };
    place.unwrap_or(&section.place)
}
