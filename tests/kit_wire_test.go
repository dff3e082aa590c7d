package tests

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"
)

// A wire is a session to which any bytes can be sent, also those that a driver would not, and any
// number of statements at a time. Each is a transaction of its own.
type wire struct {
	conn     net.Conn
	frontend *pgproto3.Frontend
}

func (db *testDB) wire(t testing.TB) *wire {
	ctx := context.Background()
	conn, err := pgconn.Connect(ctx, db.URL)
	require.NoError(t, err)
	hijacked, err := conn.Hijack()
	require.NoError(t, err)
	t.Cleanup(func() { hijacked.Conn.Close() })
	return &wire{hijacked.Conn, hijacked.Frontend}
}

// A message is sent with others or alone, and is answered before the next one is read.
type message []pgproto3.FrontendMessage

// simple is SQL in the simple protocol.
func simple(sql string) message { return message{&pgproto3.Query{String: sql}} }

// extended is a statement prepared under a name, with parameters, in the extended protocol.
func extended(name string, formats []int16, parameters [][]byte) message {
	return message{
		&pgproto3.Bind{PreparedStatement: name, ParameterFormatCodes: formats, Parameters: parameters},
		&pgproto3.Execute{},
		&pgproto3.Sync{},
	}
}

func prepare(name, sql string) message {
	return message{&pgproto3.Parse{Name: name, Query: sql}, &pgproto3.Sync{}}
}

// A response is what a message was answered with: an SQLSTATE, or rows of columns parted by bars.
type response struct {
	code, message string
	rows          []string
}

func (r response) String() string {
	if r.code != "" {
		return r.code + " " + r.message
	}
	return fmt.Sprintf("%q", r.rows)
}

// ask sends all messages while it reads the responses.
func (w *wire) ask(messages []message) ([]response, error) {
	var bytes []byte
	for _, message := range messages {
		for _, part := range message {
			var err error
			if bytes, err = part.Encode(bytes); err != nil {
				return nil, err
			}
		}
	}
	if err := w.conn.SetDeadline(time.Now().Add(10 * patience)); err != nil {
		return nil, err
	}
	sent := make(chan error, 1)
	go func() {
		_, err := w.conn.Write(bytes)
		sent <- err
	}()
	responses := make([]response, len(messages))
	for i := range responses {
		if err := w.read(&responses[i]); err != nil {
			return nil, fmt.Errorf("no answer to message %d of %d: %w", i+1, len(messages), err)
		}
	}
	return responses, <-sent
}

func (w *wire) read(r *response) error {
	for {
		received, err := w.frontend.Receive()
		if err != nil {
			return err
		}
		switch m := received.(type) {
		case *pgproto3.DataRow:
			var columns strings.Builder
			for i, value := range m.Values {
				if i > 0 {
					columns.WriteByte('|')
				}
				columns.Write(value)
			}
			r.rows = append(r.rows, columns.String())
		case *pgproto3.ErrorResponse:
			r.code, r.message = m.Code, m.Message
		case *pgproto3.ReadyForQuery:
			if m.TxStatus != 'I' {
				return fmt.Errorf("left in a transaction (%c)", m.TxStatus)
			}
			return nil
		}
	}
}
