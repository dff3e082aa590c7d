package torture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

const (
	slotCapacity = 4
	slotLease    = 300 * time.Millisecond
)

// lendNoted defines the policies, and a function that makes a call and notes what a slotLedger needs to know of it.
func lendNoted(db *kit.TestDB) {
	db.Lend("durable", slotCapacity, slotLease, kit.Durable).Lend("ephemeral", slotCapacity, slotLease, kit.Ephemeral)
	db.Execute(`
		create function public.noted(kind text, policy text, key text, holder text, cost bigint,
		    out held boolean, out renewed boolean, out before bigint, out after bigint, out changes bigint)
		  language plpgsql volatile
		as $$
		begin
		  before  := extract(epoch from clock_timestamp()) * 1000000;
		  renewed := false;
		  case kind
		    when 'hold'    then select h.allowed, h.renewed into held, renewed from ratelimit_hold($2, $3, $4, $5) as h;
		    when 'renew'   then held := ratelimit_renew($2, $3, $4) is not null;
		    when 'release' then held := ratelimit_release($2, $3, $4);
		  end case;
		  after := extract(epoch from clock_timestamp()) * 1000000;
		  select coalesce(max(s.changes), 0) into changes
		    from (table ratelimit.slots union all table ratelimit.ephemeral_slots) as s join ratelimit.policies as p on p.id = s.policy_id
		   where p.name = $2 and s.key = $3;
		end $$`)
}

// A slotSession makes calls about one key, one after the other, and loses its connection now and then.
type slotSession struct {
	name        string
	policy, key string
	url         func() string
	note        func(slotEvent)
	ctx         context.Context // done at the end

	conn   *pgx.Conn
	newest int64 // instant of the server's clock that it knows
}

// run takes one plan after the other. Its error is that of a call that failed as none may.
func (s *slotSession) run(first int) error {
	defer s.hangUp()
	for n := first; s.ctx.Err() == nil; n++ {
		h := slotEvent{Policy: s.policy, Key: s.key, Holder: fmt.Sprint(s.name, " ", n), Cost: 1 + rand.Int64N(3)}
		for _, step := range slotPlans[n%len(slotPlans)] {
			held, err := s.take(step, h)
			if err != nil {
				if s.hangUp(); !isOutage(err) {
					return err
				}
				if step.kind != "hold" { // which is asked again
					break
				}
				held, err = s.take(slotStep{kind: "hold"}, h)
				if err != nil {
					s.hangUp()
					break
				}
			}
			if step.kind == "hold" && !held {
				s.pause(5 * time.Millisecond)
				break
			}
		}
	}
	return nil
}

// A slotStep is a call in a transaction that ends in a way: alone, by "commit", by "rollback", or with the connection.
type slotStep struct{ kind, end string }

var (
	holdIt, renewIt, releaseIt = slotStep{kind: "hold"}, slotStep{kind: "renew"}, slotStep{kind: "release"}
	lapse, die                 = slotStep{kind: "lapse"}, slotStep{kind: "die"}
)

// slotPlans are what a holder does, unless it is denied.
var slotPlans = [][]slotStep{
	{holdIt, releaseIt},
	{{"hold", "commit"}, renewIt, {"release", "commit"}},
	{{"hold", "rollback"}, renewIt},
	{holdIt, {"renew", "rollback"}, {"release", "rollback"}, renewIt, releaseIt},
	{holdIt, holdIt, {"renew", "commit"}, releaseIt},
	{holdIt, lapse, renewIt, releaseIt},
	{holdIt, renewIt, die},
	{{"hold", "die"}},
	{holdIt, {"release", "die"}, releaseIt},
	{holdIt, releaseIt, renewIt, releaseIt},
	{{"hold", "commit"}, lapse, renewIt},
}

func (s *slotSession) take(step slotStep, h slotEvent) (held bool, err error) {
	switch step.kind {
	case "lapse":
		s.pauseFor(slotLease)
		return false, nil
	case "die":
		s.die(h)
		return false, nil
	}
	s.pause(10 * time.Millisecond)
	if s.conn == nil {
		if err := s.connect(); err != nil {
			return false, err
		}
	}
	e := h
	e.Kind = step.kind
	if e.Kind == "release" {
		sent := e
		sent.Outcome, sent.Before = "sent", s.newest
		s.note(sent)
	}
	err = s.call(step, &e)
	if err != nil {
		e = h
		e.Kind, e.Outcome = step.kind, "unknown"
	}
	s.newest = max(s.newest, e.Sealed)
	s.note(e)
	if err == nil && step.end == "die" {
		s.die(h)
	}
	return e.Held, err
}

func (s *slotSession) call(step slotStep, e *slotEvent) error {
	ctx := context.Background()
	if step.end != "" {
		if _, err := s.conn.Exec(ctx, "begin"); err != nil {
			return err
		}
	}
	err := s.conn.QueryRow(ctx, "select held, renewed, before, after, changes from public.noted($1, $2, $3, $4, $5)", e.Kind, e.Policy, e.Key, e.Holder, e.Cost).
		Scan(&e.Held, &e.Renewed, &e.Before, &e.After, &e.Changes)
	if e.Sealed, e.Outcome = e.After, "committed"; err != nil || step.end == "" {
		return err
	}
	if rand.IntN(3) == 0 { // others wait
		s.pause(60 * time.Millisecond)
	}
	if err := s.conn.QueryRow(ctx, "select (extract(epoch from clock_timestamp()) * 1000000)::bigint").Scan(&e.Sealed); err != nil {
		return err
	}
	if step.end != "commit" {
		e.Outcome = "rolled back"
	}
	if step.end == "die" {
		return nil
	}
	return kit.ErrorOf(s.conn.Exec(ctx, step.end))
}

func (s *slotSession) connect() (err error) {
	s.conn, err = pgx.Connect(s.ctx, s.url())
	if err != nil {
		s.conn = nil
		s.pause(20 * time.Millisecond) // callers without a pause would take the processors from a server that starts
		return err
	}
	return kit.ErrorOf(s.conn.Exec(context.Background(), "set application_name = 'slots'"))
}

// die closes the connection without a word to the server.
func (s *slotSession) die(h slotEvent) {
	s.hangUp()
	h.Kind, h.Outcome, h.Held = "death", "", false
	s.note(h)
}

func (s *slotSession) hangUp() {
	if s.conn != nil {
		_ = s.conn.PgConn().Conn().Close()
		_ = s.conn.Close(context.Background())
		s.conn = nil
	}
}

func (s *slotSession) pause(most time.Duration) { s.pauseFor(rand.N(most)) }

func (s *slotSession) pauseFor(d time.Duration) {
	select {
	case <-s.ctx.Done():
	case <-time.After(d):
	}
}

// isOutage reports whether a connection was refused, lost, or ended by the server.
func isOutage(err error) bool {
	var answer *pgconn.PgError
	return !errors.As(err, &answer) || strings.HasPrefix(answer.Code, "57P") || answer.SeverityUnlocalized == "FATAL"
}

// asSlotSessions is set for a process of this test binary that is some sessions.
const asSlotSessions = "RATELIMIT_TEST_AS_SLOT_SESSIONS"

// slotSessions are some sessions, as a process or in this one.
type slotSessions struct {
	Name, URL string
	Policies  []string // of each key
	First     int      // their numbers
	Sessions  int
}

// start starts the sessions.
func (p slotSessions) start(ctx context.Context, url func() string, note func(slotEvent), fail func(error)) (done *sync.WaitGroup) {
	done = new(sync.WaitGroup)
	for n := p.First; n < p.First+p.Sessions; n++ {
		s := &slotSession{
			name: fmt.Sprint(p.Name, "/", n), policy: p.Policies[n%len(p.Policies)], key: fmt.Sprint(p.Name, "/", n%len(p.Policies)),
			url: url, note: note, ctx: ctx,
		}
		done.Go(func() {
			if err := s.run(n / len(p.Policies)); err != nil {
				fail(fmt.Errorf("%s: %w", s.name, err))
			}
		})
	}
	return done
}

// beSlotSessions reports whether this process was one, and is done.
func beSlotSessions() bool { return kit.BeProcess(asSlotSessions, slotSessions.be) }

// be writes each event before it goes on, and ends with the standard input.
func (p slotSessions) be() error {
	orDie := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	var mu sync.Mutex
	events := json.NewEncoder(os.Stdout)
	ctx, stop := context.WithCancel(context.Background())
	done := p.start(ctx, func() string { return p.URL }, func(e slotEvent) {
		mu.Lock()
		defer mu.Unlock()
		orDie(events.Encode(e))
	}, orDie)
	_, _ = io.Copy(io.Discard, os.Stdin)
	stop()
	done.Wait()
	return nil
}

// process starts the sessions in a process, whose events are noted here.
func (p slotSessions) process(t *testing.T, note func(slotEvent)) *kit.Process {
	running := kit.StartProcess(t, asSlotSessions, p)
	running.Read = make(chan struct{})
	go func() {
		defer close(running.Read)
		events := json.NewDecoder(running.Answers)
		for {
			var e slotEvent
			if events.Decode(&e) != nil { // the last one of a process that was killed
				return
			}
			note(e)
		}
	}()
	return running
}

// A slotLoad is sessions under way, in this process and in others.
type slotLoad struct {
	*slotLedger
	url       atomic.Pointer[string]
	processes []*kit.Process
	end       func()
}

// startSlotLoad starts sessions with keys of a round. So many of them are in this process, and eight in each of the others.
func startSlotLoad(t *testing.T, ledger *slotLedger, url string, round slotSessions, processes int) *slotLoad {
	l := &slotLoad{slotLedger: ledger}
	l.url.Store(&url)
	ctx, stop := context.WithCancel(context.Background())
	done := round.start(ctx, func() string { return *l.url.Load() }, l.note, l.fail)
	for n := range processes {
		p := round
		p.URL, p.First, p.Sessions = url, round.Sessions+n*8, 8
		l.processes = append(l.processes, p.process(t, l.note))
	}
	l.end = sync.OnceFunc(func() { stop(); done.Wait() })
	t.Cleanup(l.end)
	return l
}

// meets returns when each of these was met since it was called, and so many holds.
func (l *slotLoad) meets(t *testing.T, holds int, what []string) {
	before, _ := l.counts()
	var missing []string
	done := func() bool {
		now, wrong := l.counts()
		require.NoError(t, wrong)
		missing = missing[:0]
		for _, kind := range what {
			if now[kind] == before[kind] {
				missing = append(missing, kind)
			}
		}
		return len(missing) == 0 && now["held"] >= before["held"]+holds
	}
	giveUp := time.After(kit.Patience)
	for !done() {
		select {
		case <-giveUp:
			require.FailNow(t, "not met", "%q, or %d holds", missing, holds)
		case <-time.After(5 * time.Millisecond):
		}
	}
}
