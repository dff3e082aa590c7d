package server_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
)

// Under load, each grant that the database has is an answer that a caller has.
func TestStop_LosesNoAnswer(t *testing.T) {
	t.Parallel()
	const callers, enough = 24, 2000
	for range 3 {
		db := newDB(t)
		s := start(t, db.URL, "NO_FLUSH=true")
		var granted atomic.Int64
		var loaded sync.WaitGroup
		isUnderLoad := make(chan struct{})
		grant := func() {
			if granted.Add(1) == enough {
				close(isUnderLoad)
			}
		}
		for i := range callers {
			key := string(rune('a' + i))
			loaded.Go(func() {
				for {
					d, err := s.rpc.Acquire(context.Background(), &pb.AcquireRequest{Policy: "budget", LogicalKey: key})
					if err != nil {
						if code := status.Code(err); code != codes.Unavailable {
							t.Errorf("%v", err)
						}
						return
					}
					if d.GetVerdict() == pb.Verdict_ALLOWED {
						grant()
					}
				}
			})
			loaded.Go(func() {
				for {
					a, err := s.post(context.Background(), "/v1/acquire", `{"policy":"budget","key":"`+key+`"}`)
					if err != nil {
						return // what kind of error it is, taken tells below
					}
					if a.body["allowed"] == true {
						grant()
					} else {
						t.Errorf("%v", a.body)
					}
				}
			})
		}
		<-isUnderLoad
		require.NoError(t, s.stop())
		loaded.Wait()
		require.Equal(t, granted.Load(), taken(t, db), "tokens that were taken, and nobody was told")
		for _, address := range []string{s.GRPCAddr().String(), s.HTTPAddr().String()} {
			_, err := net.Dial("tcp", address)
			require.ErrorIs(t, err, syscall.ECONNREFUSED)
		}
	}
}

// A call that waits for the database is waited for.
func TestStop_WaitsForCallsUnderWay(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL, "DATABASE_CALLS=4")
	unlock := lock(t, db)
	answered := make(chan error, 2)
	go func() {
		_, err := s.rpc.Acquire(t.Context(), &pb.AcquireRequest{Policy: "budget", LogicalKey: "k"})
		answered <- err
	}()
	go func() {
		a, err := s.post(t.Context(), "/v1/charge", `{"policy":"budget","key":"l","cost":1}`)
		if err == nil && a.body["allowed"] != true {
			err = errors.New("not allowed")
		}
		answered <- err
	}()
	awaitBlocked(t, db, 2)
	stopped := make(chan error, 1)
	go func() { stopped <- s.stop() }()
	require.Eventually(t, func() bool { // no more calls get in
		_, grpcErr := net.Dial("tcp", s.GRPCAddr().String())
		_, httpErr := net.Dial("tcp", s.HTTPAddr().String())
		return errors.Is(grpcErr, syscall.ECONNREFUSED) && errors.Is(httpErr, syscall.ECONNREFUSED)
	}, 20*time.Second, time.Millisecond)
	require.Empty(t, stopped)
	unlock()
	require.NoError(t, <-answered)
	require.NoError(t, <-answered)
	require.NoError(t, <-stopped)
	require.EqualValues(t, 2, taken(t, db))
}

// But no longer than it was told, and it says how many it has not answered.
func TestStop_EndsWhatTakesTooLong(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL, "STOP_TIMEOUT=50ms")
	unlock := lock(t, db)
	answered := make(chan error, 2)
	go func() {
		_, err := s.rpc.Acquire(t.Context(), &pb.AcquireRequest{Policy: "budget", LogicalKey: "k"})
		answered <- err
	}()
	awaitBlocked(t, db, 1)
	go func() {
		_, err := s.post(t.Context(), "/v1/charge", `{"policy":"budget","key":"l","cost":1}`)
		answered <- err
	}()
	awaitBlocked(t, db, 2)
	require.ErrorContains(t, s.Stop(), "2 calls were not answered within STOP_TIMEOUT")
	s.stop = func() error { return nil }
	require.Error(t, <-answered)
	require.Error(t, <-answered)
	awaitBlocked(t, db, 0)
	unlock()
	require.Zero(t, taken(t, db))
}

// Clients that keep their connections keep nobody.
func TestStop_DoesNotWaitForIdleConnections(t *testing.T) {
	t.Parallel()
	s := start(t, newDB(t).URL, "STOP_TIMEOUT=100ms")
	for _, address := range []net.Addr{s.GRPCAddr(), s.HTTPAddr()} {
		for range 50 {
			conn, err := net.Dial("tcp", address.String())
			require.NoError(t, err)
			defer conn.Close()
		}
	}
	require.NoError(t, s.stop())
}

func TestStop_LeavesNoGoroutines(t *testing.T) {
	db := newDB(t)
	require.NoError(t, db.Pool.Ping(t.Context()))
	before := goleak.IgnoreCurrent()
	for range 2 {
		t.Run("", func(t *testing.T) {
			s := start(t, db.URL)
			var callers sync.WaitGroup
			for i := range 100 {
				callers.Go(func() {
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					if i%3 == 0 {
						go cancel()
					}
					if i%2 == 0 {
						_, _ = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "budget", LogicalKey: "k"})
					} else {
						_, _ = s.post(ctx, "/v1/acquire", `{"policy":"budget","key":"k"}`)
					}
				})
			}
			callers.Wait()
			require.NoError(t, reflect(t.Context(), s))
			_, err := s.do(t.Context(), "GET", "/metrics", strings.NewReader(""))
			require.NoError(t, err)
		})
	}
	goleak.VerifyNone(t, before)
}
