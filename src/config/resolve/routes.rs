//! Routes: what they match, where they lead, and whether every plan can afford them.

use std::sync::Arc;

use actix_web::http::Method;

use super::{Context, plans};
use crate::config::mistakes::Fault;
use crate::config::raw::{ChargeWhen, Enforce, Raw, RouteSection};
use crate::config::reader::Written;
use crate::config::sources::Purpose;
use crate::limit::{Rule, Scope};
use crate::plan::{Cost, FreeAnswers, Methods, Pattern, Plan, Route};

/// A route that could be read, with where it is written.
struct Placed<'a> {
    section: &'a RouteSection,
    route: Route,
}

pub(super) fn resolve(
    raw: &Raw,
    plan_names: &[&str],
    upstream_names: &[&str],
    context: &Context<'_>,
) -> Vec<Route> {
    if raw.routes.is_empty() && !context.incomplete {
        let fault =
            Fault::new("there is no route, so nothing could be called").hint("add a [routes.NAME] table");
        context.notes.add(fault.at(&raw.place));
    }
    let mut placed: Vec<Placed<'_>> = Vec::new();
    for section in &raw.routes {
        check_references(section, plan_names, upstream_names, context);
        let Some(route) = route(section, context) else {
            continue;
        };
        if let Some(other) = placed.iter().find(|other| collide(&other.route, &route)) {
            let fault = Fault::new(format!(
                "routes.{} has the same path and method: only one of them could ever match",
                other.section.name
            ));
            context.notes.add(fault.at(&section.place));
        }
        placed.push(Placed { section, route });
    }
    placed.into_iter().map(|placed| placed.route).collect()
}

fn check_references(
    section: &RouteSection,
    plan_names: &[&str],
    upstream_names: &[&str],
    context: &Context<'_>,
) {
    if let Some(upstream) = &section.upstream {
        context.exists("upstream", upstream, upstream_names);
    }
    if !section.has_upstream && context.purpose == Purpose::Gateway {
        let fault = Fault::new("\"upstream\" is missing").meant("", upstream_names.iter().copied());
        context.notes.add(fault.at(&section.place));
    }
    let Some(plans) = &section.plans else { return };
    if plans.value.is_empty() {
        let fault = Fault::new("gives the route to no plan").hint("name a plan, or remove the route");
        context.note(fault, plans);
    }
    for plan in &plans.value {
        context.exists("plan", plan, plan_names);
    }
}

fn route(section: &RouteSection, context: &Context<'_>) -> Option<Route> {
    let pattern = pattern(section, context);
    let methods = methods(section, context);
    let cost = cost(section, methods, context);
    Some(Route {
        name: section.name.as_str().into(),
        pattern: pattern?,
        methods: methods?,
        cost: cost?,
        pool: plans::rules(&section.limits, &Scope::Pool, Enforce::On, context),
        upstream: section.upstream.as_ref().map(|name| name.value.as_str().into()),
        plans: section.plans.as_ref().map(|plans| shared(&plans.value)),
        on_failure: section.on_failure.as_ref().map(|written| written.value),
    })
}

/// What requests cost on a route that serves these methods, if they could be read.
fn cost(section: &RouteSection, served: Option<Methods>, context: &Context<'_>) -> Option<Cost> {
    let mut by_method = Vec::new();
    for (method, cost) in &section.method_costs {
        let Some(cost) = cost else { continue };
        if **method == Method::HEAD {
            context.note(Fault::new("a HEAD request costs what a GET does").hint("write GET"), cost);
        } else if served.is_some_and(|served| !served.serves(method)) {
            context.note(Fault::new("the route does not serve this method"), cost);
        }
        by_method.push(((*method).clone(), cost.value));
    }
    let refund_on = section.refund_on.as_ref().map_or(&[][..], |written| &written.value);
    let statuses = refund_on.iter().filter_map(|status| u16::try_from(status.value).ok()).collect();
    let server_errors =
        section.charge_when.as_ref().is_some_and(|written| written.value == ChargeWhen::Not5xx);
    Some(Cost {
        any: section.cost.as_ref()?.value,
        by_method,
        from: section.cost_from.as_ref().map(|name| name.value.clone()),
        free: FreeAnswers { server_errors, statuses },
    })
}

fn pattern(section: &RouteSection, context: &Context<'_>) -> Option<Pattern> {
    let path = section.path.as_ref()?;
    let parsed = Pattern::parse(&path.value);
    parsed.map_err(|error| context.note(Fault::new(error.to_string()), path)).ok()
}

/// The methods of a route; all of them when it names none.
fn methods(section: &RouteSection, context: &Context<'_>) -> Option<Methods> {
    let Some(written) = &section.methods else {
        return Some(Methods::all());
    };
    let names: Vec<String> = written.value.iter().map(|name| name.value.clone()).collect();
    let parsed = Methods::parse(&names);
    parsed.map_err(|error| context.note(Fault::new(error.to_string()), written)).ok()
}

fn shared(names: &[Written<String>]) -> Vec<Arc<str>> {
    names.iter().map(|name| name.value.as_str().into()).collect()
}

/// Whether one request could match both and neither is the more specific.
fn collide(one: &Route, other: &Route) -> bool {
    one.pattern.same_paths(&other.pattern) && one.methods.overlaps(other.methods)
}

/// A request that costs more than a limit can ever hold could never pass.
pub(super) fn check_costs(raw: &Raw, plans: &[Plan], routes: &[Route], context: &Context<'_>) {
    for route in routes {
        let section = raw.routes.iter().find(|section| *section.name == *route.name);
        let Some(section) = section else { continue };
        let largest = route.cost.largest();
        let of_method = section.method_costs.iter().filter_map(|(_, cost)| cost.as_ref());
        let Some(cost) = section.cost.iter().chain(of_method).find(|cost| cost.value == largest) else {
            continue;
        };
        let too_small = |rule: &&Rule| rule.algorithm.capacity() < largest;
        let fault = |rule: &Rule, whose: &str| {
            Fault::new(format!(
                "costs {largest}, but limit \"{}\" of {whose} never holds more than {}",
                rule.name,
                rule.algorithm.capacity()
            ))
        };
        if let Some(rule) = route.pool.iter().find(too_small) {
            let hint = "lower the cost, or raise the limit";
            context.note(fault(rule, "the route").hint(hint), cost);
        }
        for plan in plans.iter().filter(|plan| plans::includes(section, &plan.name)) {
            let own = plan.routes.get(&route.name).into_iter().flatten();
            if let Some(rule) = plan.limits.iter().chain(own).find(too_small) {
                let hint = "lower the cost, raise the limit, or leave the plan out with `plans`";
                context.note(fault(rule, &format!("plan \"{}\"", plan.name)).hint(hint), cost);
            }
        }
    }
}
