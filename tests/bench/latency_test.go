package main

import (
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// pipe returns the ends of a connection with a latency.
func pipe(l latency) (server, client net.Conn) {
	server, there := net.Pipe()
	client, here := net.Pipe()
	l.between(here, there, goSleeper{}, goSleeper{})
	return server, client
}

// Time is synctest's: it stands still but for sleeps, so each piece must arrive at its very moment.
func TestLatency_DelaysEachPieceByHalfAndKeepsTheOrder(t *testing.T) {
	t.Parallel()
	for _, direction := range []string{"there", "back"} {
		t.Run(direction, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				server, client := pipe(latency(10 * time.Millisecond))
				from, to := client, server
				if direction == "back" {
					from, to = server, client
				}
				const pieces = 100
				go func() {
					for i := range pieces { // twenty before the first has arrived
						_, _ = fmt.Fprintf(from, "%02d", i)
						time.Sleep(time.Millisecond / 4)
					}
					from.Close()
				}()
				for i := range pieces {
					piece := make([]byte, 2)
					_, err := io.ReadFull(to, piece)
					require.NoError(t, err)
					require.Equal(t, fmt.Sprintf("%02d", i), string(piece))
					require.Equal(t, 5*time.Millisecond+time.Duration(i)*time.Millisecond/4, time.Since(begin))
				}
				_, err := to.Read(make([]byte, 1))
				require.ErrorIs(t, err, io.EOF)
			})
		})
	}
}

// The other end is told, and no goroutine stays: synctest would wait for it.
func TestLatency_EndsWithTheConnection(t *testing.T) {
	t.Parallel()
	for name, sent := range map[string]string{"idle": "", "writing": "never read"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				server, client := pipe(latency(time.Millisecond))
				for _, b := range []byte(sent) {
					_, err := client.Write([]byte{b})
					require.NoError(t, err)
				}
				time.Sleep(time.Second)
				server.Close()
				_, err := client.Read(make([]byte, 1))
				require.ErrorIs(t, err, io.EOF)
			})
		})
	}
}

// Not how much later it comes: that is the machine's affair.
func TestLatency_OfASocketIsNeverLessAndChangesNothing(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	require.NoError(t, err)
	defer listener.Close()
	go func() {
		if conn, err := listener.Accept(); err == nil {
			_, _ = io.Copy(conn, conn)
		}
	}()
	const added = time.Millisecond
	conn, err := latency(added).dial(t.Context(), "unix", socket)
	require.NoError(t, err)
	defer conn.Close()

	message := []byte(strings.Repeat("0123456", 50_000)) // more than a piece
	for range 10 {
		begin := time.Now()
		go func() { _, _ = conn.Write(message) }()
		echo := make([]byte, len(message))
		_, err := io.ReadFull(conn, echo)
		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Since(begin), added)
		require.Equal(t, message, echo)
	}
}
