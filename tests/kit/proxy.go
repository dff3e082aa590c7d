package kit

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A Proxy stands between clients and a server, and does what faults chooses to the messages of both.
type Proxy struct {
	Listener net.Listener
	Server   *pgconn.Config
	faults   atomic.Pointer[Faults]
	Done     [Vanish + 1]atomic.Int64 // how often each was done

	Mu      sync.Mutex
	Lines   map[*Line]struct{}
	closed  bool
	Running sync.WaitGroup
}

// A Fault is done to what arrives in one piece, a message or a few.
type Fault int

const (
	Pass    Fault = iota
	Delay         // it comes later
	Cut           // half of it comes, then the connection ends
	Reset         // the client's end is reset
	Swallow       // neither this reply comes nor another, until the connection ends
	Vanish        // nothing comes any more in either direction, and the client is not told of the end
)

// Faults chooses one for what a client sent, or what the server replied.
type Faults func(reply bool) Fault

// NewProxy stands before the server of db, without faults.
func NewProxy(t testing.TB, db *TestDB) *Proxy {
	listener := NoError(net.Listen("tcp", "127.0.0.1:0"))(t)
	p := &Proxy{Listener: listener, Server: &db.Pool.Config().ConnConfig.Config, Lines: make(map[*Line]struct{})}
	p.Heal()
	p.Running.Go(p.Serve)
	t.Cleanup(p.Close)
	return p
}

func (p *Proxy) Plan(f Faults) { p.faults.Store(&f) }

// Heal stops new faults. Connections that hang go on hanging.
func (p *Proxy) Heal() { p.Plan(func(bool) Fault { return Pass }) }

// Pool connects through the proxy. Its settings are those that users have, but for its connect_timeout:
// by default a connection attempt without an answer keeps its place in the pool for two minutes.
func (p *Proxy) Pool(t testing.TB, db *TestDB, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	through := func(config *pgxpool.Config) {
		config.ConnConfig.ConnectTimeout = time.Second
		config.ConnConfig.RuntimeParams["application_name"] = "through a proxy"
		config.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", p.Listener.Addr().String())
		}
	}
	return Pool(t, db.URL, slices.Insert(change, 0, through)...)
}

func (p *Proxy) Serve() {
	for {
		client, err := p.Listener.Accept()
		if err != nil {
			return
		}
		network, address := pgconn.NetworkAddress(p.Server.Host, p.Server.Port)
		server, err := p.Server.DialFunc(context.Background(), network, address)
		if err != nil {
			client.Close()
			continue
		}
		l := &Line{proxy: p, client: client.(*net.TCPConn), Server: server}
		p.Mu.Lock()
		if p.closed {
			l.End()
		}
		p.Lines[l] = struct{}{}
		p.Mu.Unlock()
		p.Running.Go(func() { l.carry(l.client, l.Server, false) })
		p.Running.Go(func() { l.carry(l.Server, l.client, true) })
	}
}

func (p *Proxy) Close() {
	p.Listener.Close()
	p.Mu.Lock()
	p.closed = true
	p.Mu.Unlock()
	p.HangUp()
	p.Running.Wait()
}

func (p *Proxy) HangUp() {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	for l := range p.Lines {
		l.End()
	}
}

type Line struct {
	proxy    *Proxy
	client   *net.TCPConn
	Server   net.Conn
	vanished atomic.Bool
}

// carry does so until an end is closed, and then closes both.
func (l *Line) carry(from, to net.Conn, reply bool) {
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
		l.proxy.Done[f].Add(1)
		switch f {
		case Delay:
			time.Sleep(rand.N(20 * time.Millisecond))
		case Cut:
			n /= 2
		case Reset:
			_ = l.client.SetLinger(0)
			n = 0
		case Swallow:
			_, _ = io.Copy(io.Discard, from)
			n = 0
		case Vanish:
			l.vanished.Store(true)
			continue
		}
		if _, err := to.Write(piece[:n]); err != nil || f >= Cut {
			break
		}
	}
	if reply && l.vanished.Load() {
		return // the client's end will tell
	}
	l.End()
	l.proxy.Mu.Lock()
	delete(l.proxy.Lines, l)
	l.proxy.Mu.Unlock()
}

func (l *Line) End() {
	l.client.Close()
	l.Server.Close()
}
