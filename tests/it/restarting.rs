//! A gateway follows another one on the same port, and no client notices.

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use crate::support::load::{Calls, while_they_come_and_go};
use crate::support::{Backend, Config, Gateway, Request, run};

const SECOND: Duration = Duration::from_secs(1);

/// Ten clients that call every 20 ms: about 500 calls a second.
const CLIENTS: usize = 10;
const PAUSE: Duration = Duration::from_millis(20);

/// Fails unless every call was answered with 200.
#[track_caller]
fn all_answered(calls: &Calls) {
    assert_eq!(calls.failed, Vec::<String>::new());
    assert_eq!(calls.answered.keys().collect::<Vec<_>>(), [&200]);
    assert!(calls.told_to_go > 0, "nobody was told to go: the old gateway had no clients");
}

#[test]
fn twenty_restarts_with_a_socket_that_is_handed_over_lose_nothing() {
    // F20: what waits at the door of a process that ends is reset, unless the door is not its own.
    let backend = Backend::ok();
    let config = Config::wide(&backend).server("drain_delay = \"100ms\"");
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let start = || Gateway::start_on_sockets(&[&socket], "", &config);
    let address = [socket.local_addr().unwrap()];
    let mut old = start();
    assert_eq!(old.address(), address[0]);
    let (calls, ()) = while_they_come_and_go(&address, CLIENTS, PAUSE, &Request::get("/x").key("k"), || {
        for restart in 0..20 {
            thread::sleep(Duration::from_millis(100));
            if restart % 2 == 0 {
                // As two instances of a service: the new one comes first.
                let new = start();
                assert_eq!(std::mem::replace(&mut old, new).stop(), 0);
            } else {
                // As `systemctl restart`: for a while nobody is there, and clients wait in the queue of the socket.
                old.signal("TERM");
                assert_eq!(old.wait(10 * SECOND), 0);
                old = start();
            }
        }
    });
    all_answered(&calls);
}

#[test]
fn gateways_that_share_a_port_follow_each_other_without_a_loss() {
    // SO_REUSEPORT alone: each of 20 plain closes reset some calls, those that waited at the old socket.
    let backend = Backend::ok();
    let first = Gateway::start(&Config::wide(&backend).server("reuse_port = true"));
    let address = first.address();
    // The later ones must take the port by its number.
    let environment = [("TOLLGATE__SERVER__LISTEN", address.to_string())];
    let config = Config::wide(&backend).server("drain_delay = \"100ms\"\nreuse_port = true");
    let start = || Gateway::start_behind("", &config, &environment);
    let mut old = start();
    assert_eq!(first.stop(), 0);
    // A new connection for each call, as fast as they can: then there is somebody at the door whenever it closes.
    let request = Request::get("/x").key("k").header("Connection", "close");
    let (calls, ()) = while_they_come_and_go(&[address], 16, Duration::ZERO, &request, || {
        for _ in 0..10 {
            let new = start();
            thread::sleep(Duration::from_millis(100));
            assert_eq!(std::mem::replace(&mut old, new).stop(), 0);
        }
    });
    all_answered(&calls);
}

#[test]
fn without_reuse_port_an_address_has_one_gateway() {
    // Two gateways on one port by mistake share the clients, and each counts half.
    let backend = Backend::ok();
    let first = Gateway::start(&Config::wide(&backend));
    let address = first.address().to_string();
    let second = run("serve", &Config::wide(&backend).text(), &[("TOLLGATE__SERVER__LISTEN", &address)]);
    assert_eq!(second.code, 1);
    assert!(second.output.contains(&format!("cannot listen on {address}")), "{}", second.output);
}

#[test]
fn a_gateway_that_cannot_listen_says_where_to_look() {
    // "Is another program using the port?", for an address of another machine and for a gateway that shares no port.
    let backend = Backend::ok();
    let first = Gateway::start(&Config::wide(&backend));
    let address = first.address().to_string();
    let refused = |address: &str, reuse_port: &str| {
        let variables = [("TOLLGATE__SERVER__LISTEN", address), ("TOLLGATE__SERVER__REUSE_PORT", reuse_port)];
        run("serve", &Config::wide(&backend).text(), &variables).output
    };
    for (address, reuse_port, question) in [
        (&*address, "false", "(is another program using the port?)"),
        (&*address, "true", "a gateway without server.reuse_port"),
        ("192.0.2.1:8080", "false", "(is it an address of this machine?)"),
    ] {
        let output = refused(address, reuse_port);
        assert!(output.contains(question), "{output}");
    }
}

#[test]
fn sockets_are_taken_by_name() {
    let backend = Backend::ok();
    let (one, two) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let gateway = Gateway::start_on_sockets(&[&one, &two], "admin:public", &Config::wide(&backend));
    assert_eq!(gateway.admin_address(), one.local_addr().unwrap());
    assert_eq!(gateway.address(), two.local_addr().unwrap());
    gateway.get("/x").key("k").send().expect(200);
    gateway.admin("/readyz").expect(200);
}
