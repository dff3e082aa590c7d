package tests

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// A proxy stands between clients and a server, and does what faults chooses to the messages of both.
type proxy struct {
	listener net.Listener
	server   *pgconn.Config
	faults   atomic.Pointer[faults]
	done     [vanish + 1]atomic.Int64 // how often each was done

	mu      sync.Mutex
	lines   map[*line]struct{}
	closed  bool
	running sync.WaitGroup
}

// A fault is done to what arrives in one piece, a message or a few.
type fault int

const (
	pass    fault = iota
	delay         // it comes later
	cut           // half of it comes, then the connection ends
	reset         // the client's end is reset
	swallow       // neither this reply comes nor another, until the connection ends
	vanish        // nothing comes any more in either direction, and the client is not told of the end
)

// faults chooses one for what a client sent, or what the server replied.
type faults func(reply bool) fault

// odds of so many in a thousand make faults.
type odds map[fault]int

func (o odds) random(random *rand.Rand) faults {
	var mu sync.Mutex
	return func(reply bool) fault {
		mu.Lock()
		defer mu.Unlock()
		n := random.IntN(1000)
		for f := delay; f <= vanish; f++ {
			if n -= o[f]; n >= 0 {
				continue
			}
			if f == swallow && !reply {
				break
			}
			return f
		}
		return pass
	}
}

// nextReply does one fault to the next reply of the server.
func nextReply(f fault) faults {
	var done atomic.Bool
	return func(reply bool) fault {
		if reply && done.CompareAndSwap(false, true) {
			return f
		}
		return pass
	}
}

func newProxy(t testing.TB, db *testDB) *proxy {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{
		listener: listener,
		server:   &db.Pool.Config().ConnConfig.Config,
		lines:    make(map[*line]struct{}),
	}
	p.heal()
	p.running.Go(p.serve)
	t.Cleanup(p.close)
	return p
}

func (p *proxy) plan(f faults) { p.faults.Store(&f) }

// heal stops new faults. Connections that hang go on hanging.
func (p *proxy) heal() { p.plan(func(bool) fault { return pass }) }

// pool connects through the proxy. Its settings are those that users have, but for its connect_timeout:
// by default a connection attempt without an answer keeps its place in the pool for two minutes.
func (p *proxy) pool(t testing.TB, db *testDB, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	config, err := pgxpool.ParseConfig(db.URL)
	require.NoError(t, err)
	config.ConnConfig.ConnectTimeout = time.Second
	config.ConnConfig.RuntimeParams["application_name"] = "through a proxy"
	config.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", p.listener.Addr().String())
	}
	for _, change := range change {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func (p *proxy) serve() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		network, address := pgconn.NetworkAddress(p.server.Host, p.server.Port)
		server, err := p.server.DialFunc(context.Background(), network, address)
		if err != nil {
			client.Close()
			continue
		}
		l := &line{proxy: p, client: client.(*net.TCPConn), server: server}
		p.mu.Lock()
		if p.closed {
			l.end()
		}
		p.lines[l] = struct{}{}
		p.mu.Unlock()
		p.running.Go(func() { l.carry(l.client, l.server, false) })
		p.running.Go(func() { l.carry(l.server, l.client, true) })
	}
}

func (p *proxy) close() {
	p.listener.Close()
	p.mu.Lock()
	p.closed = true
	for l := range p.lines {
		l.end()
	}
	p.mu.Unlock()
	p.running.Wait()
}

// A line is one connection through the proxy.
type line struct {
	proxy    *proxy
	client   *net.TCPConn
	server   net.Conn
	vanished atomic.Bool
}

// carry does so until an end is closed, and then closes both.
func (l *line) carry(from, to net.Conn, reply bool) {
	piece := make([]byte, 32<<10)
	for {
		n, err := from.Read(piece)
		if err != nil {
			break
		}
		if l.vanished.Load() {
			continue
		}
		f := (*l.proxy.faults.Load())(reply)
		l.proxy.done[f].Add(1)
		switch f {
		case delay:
			time.Sleep(rand.N(20 * time.Millisecond))
		case cut:
			n /= 2
		case reset:
			_ = l.client.SetLinger(0)
			n = 0
		case swallow:
			_, _ = io.Copy(io.Discard, from)
			n = 0
		case vanish:
			l.vanished.Store(true)
			continue
		}
		if _, err := to.Write(piece[:n]); err != nil || f >= cut {
			break
		}
	}
	if reply && l.vanished.Load() {
		return // the client's end will tell
	}
	l.end()
	l.proxy.mu.Lock()
	delete(l.proxy.lines, l)
	l.proxy.mu.Unlock()
}

func (l *line) end() {
	l.client.Close()
	l.server.Close()
}
